"""Three programs in the memory of one and a half, of random sizes, on a real lab.

``python -m tests.acceptance.crowded --sizes 500``: for each size three clients run a
program at the same time that needs up to two thirds of the devices' memory.  All
must finish with the right results, no device may ever hold more than its limit, and when they
have ended, what the accounts count is what hosts say they hold.  Now and then, and at the
end, each keeps some arrays, and JAX is asked, in the device process, how many bytes of arrays
there really are on each device: as many as the accounts count, but for some bytes of
finished gangs (a receipt has one on each device).
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from typing import Any

import jax
import numpy as np

import pathways_lab as pw
from pathways_lab.timeline.records import Sample

MEMORY = 16 << 20
"""Bytes of a device."""
DEVICES = 2
EVERY = 25
"""Sizes between two looks at JAX's own arrays."""
RECEIPTS = 1024
"""Bytes on a device that are no values of anybody."""


class Tenant:
    """A client with a program of three arrays: an argument, one made of it, and their sum."""

    def __init__(self, lab: pw.Lab) -> None:
        self.lab = lab
        self.on = on = lab.slice(DEVICES)
        self.double = double = pw.jit(lambda x: 2 * x, on=on)
        total = pw.jit(lambda x, y: (x + y)[:1], on=on)
        self.program = pw.program(lambda x: total(x, double(x)), name="crowded")

    def run(self, elements: int, number: int, wrong: list[str]) -> None:
        """One size; in a thread of its own."""
        try:
            made = self.program(np.full(elements, number, np.float32))
            found = float(made.result(timeout=120)[0])
            if found != 3 * number:
                wrong.append(f"{self.lab.name}: {found} instead of {3 * number}")
        except Exception as error:
            wrong.append(f"{self.lab.name}: {error!r:.300}")

    def keep(self, elements: int) -> tuple[pw.Handle, pw.Handle]:
        """Two arrays, on devices: an upload is not before its first reader."""
        x = pw.device_put(np.ones(elements, np.float32), self.on)
        return x, self.double(x).block_until_ready()


class Live:
    """Asks JAX in the device process what arrays there are on the devices of a slice."""

    def __init__(self, lab: pw.Lab, on: pw.Slice) -> None:
        def count(_: Any) -> Any:
            # Here the slice is its hosts' own: these are JAX's devices.
            number = {device.id: at for at, device in enumerate(on.devices)}
            found: dict[tuple[int, int], int] = {}
            for array in on.devices[0].client.live_arrays():
                for shard in array.addressable_shards:
                    place = number[shard.device.id], shard.data.unsafe_buffer_pointer()
                    found[place] = max(shard.data.nbytes, found.get(place, 0))
            used = [sum(n for (at, _), n in found.items() if at == d) for d in range(DEVICES)]
            return np.array(used, np.int32)

        shape = jax.ShapeDtypeStruct((DEVICES,), np.int32)
        self._ask = pw.jit(lambda x: jax.pure_callback(count, shape, x), on=lab.slice(1))

    def bytes(self) -> list[int]:
        """On each device."""
        return [int(n) for n in self._ask(np.int32(0)).result(timeout=60)]


def compared(lab: pw.Lab, tenants: list[Tenant], live: Live, rng: random.Random) -> tuple[str, int]:
    """The three keep something: what is counted and what is there, and the largest difference."""
    most = MEMORY // 3 // 2 // 4
    kept = [tenant.keep(rng.randint(most // 2, most)) for tenant in tenants]
    nbytes = sum(handle.nbytes for pair in kept for handle in pair)
    until = time.monotonic() + 20
    while time.monotonic() < until and lab.accounts().total.nbytes != DEVICES * nbytes:
        time.sleep(0.05)
    counted, there = lab.accounts().total.nbytes, live.bytes()
    most_apart = max(abs(n - counted // DEVICES) for n in there)
    return f"accounts count {counted:,} bytes, JAX has {there} on the devices", most_apart


def levels(lab: pw.Lab) -> list[Sample]:
    """What hosts said about their memory."""
    records = lab.timeline.records
    return [r for r in records if isinstance(r, Sample) and r.name == "memory"]


def last(lab: pw.Lab) -> float:
    """Bytes that all devices hold, as hosts last said."""
    found: dict[tuple[str, Any], float] = {}
    for sample in levels(lab):
        found[sample.host, sample.args["device"]] = sample.value
    return sum(found.values())


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, begun = random.Random(options.seed), time.monotonic()
    wrong: list[str] = []
    with pw.start(
        islands=1, hosts_per_island=1, devices_per_host=DEVICES, memory=MEMORY, name="first"
    ) as lab:
        others = [pw.Lab(lab._control, name=name) for name in ("second", "third")]
        tenants = [Tenant(one) for one in (lab, *others)]
        live = Live(lab, tenants[0].on)
        peak, done, waited, apart = 0.0, 0, 0, 0
        for _ in range(options.sizes):
            # A program's peak is three of these.
            most = MEMORY * 2 // 3 // 3 // 4
            sizes = [rng.randint(most // 2, most) for _ in tenants]
            waited += 12 * sum(sizes) > MEMORY
            threads = [
                threading.Thread(target=tenant.run, args=(n, number + 1, wrong))
                for number, (tenant, n) in enumerate(zip(tenants, sizes, strict=True))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            done += 1
            peak = max([peak, *(sample.value for sample in levels(lab)[-1000:])])
            if done % EVERY == 0 or done == options.sizes:
                text, difference = compared(lab, tenants, live, rng)
                apart = max(apart, difference)
                print(f"after {done} sizes {text}", flush=True)
            if wrong or peak > MEMORY:
                break
            if done % 50 == 0:
                print(f"{done} sizes, {time.monotonic() - begun:.0f} s", flush=True)
        until = time.monotonic() + 20
        while time.monotonic() < until and last(lab) != lab.accounts().total.nbytes:
            time.sleep(0.1)
        held, counted = last(lab), lab.accounts().total.nbytes
        for one in others:
            one.close()
    print(
        f"{done} sizes in {time.monotonic() - begun:.0f} s, {waited} of them larger together than"
        f" the memory: {len(wrong)} wrong {wrong[:3]}; peak {peak:,.0f} of {MEMORY:,} bytes;"
        f" at the end hosts hold {held:,.0f} bytes, accounts count {counted:,};"
        f" accounts and JAX's own arrays were at most {apart:,} bytes apart on a device"
    )
    failed = bool(wrong) or peak > MEMORY or done < options.sizes
    sys.exit(failed or held != counted or apart > RECEIPTS)


if __name__ == "__main__":
    main()
