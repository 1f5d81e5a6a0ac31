"""The same gang, run by the lab and by its peers: one module per framework.

Each is a child (``python -m benchmarks.gangs.NAME``) that serves rounds of the
four cases of :mod:`.work` on a number of hosts.  They import nothing of the lab
but in ``ours``: peers may live in an environment of their own.
"""
