"""A script without a ``__main__`` guard that starts a lab and waits: a kernel to be killed."""

from __future__ import annotations

import json
import os
import sys
import time

from pathways_lab.runtime.cluster.embedded import start_cluster
from pathways_lab.runtime.cluster.lab_spec import Wishes

print(json.dumps({"pid": os.getpid()}), flush=True)
cluster = start_cluster(Wishes(2, 1, 2, platform="cpu"), host_module=sys.argv[1])
print(
    json.dumps({"pids": cluster.pids, "folder": str(cluster.folder)}),
    flush=True,
)
time.sleep(600)
