// A small timeline: what devices did of late, each in a row, in the colours of their programs.
// It is made of the answers that the panel gets anyway, so it costs the lab nothing.

export const SPAN = 30; // seconds that it looks back
const ROWS = 32; // more devices share a row by host, and more hosts by island
const HIGH = 160; // pixels of all rows at most
const ROW = 8; // pixels of a row at most
const GAP = 3; // pixels between islands

const mean = (devices) => ({
  busy: devices.reduce((sum, device) => sum + device.busy, 0) / Math.max(1, devices.length),
  colour: devices.reduce((most, device) => (device.busy > most.busy ? device : most), { busy: 0 }).colour,
});

// The rows of each island: its devices, or its hosts, or itself.
function rowsOf(islands) {
  const all = islands.map(({ hosts }) => hosts.map(({ devices }) => devices));
  if (all.flat(2).length <= ROWS) return all.map((hosts) => hosts.flat());
  if (all.flat().length <= ROWS) return all.map((hosts) => hosts.map(mean));
  return all.map((hosts) => [mean(hosts.flat())]);
}

export class Timeline {
  constructor(canvas) {
    this.canvas = canvas;
    this.seen = []; // {at, islands}, oldest first: so it is until the next one
  }

  clear() {
    this.seen = [];
  }

  // islands: as they are now; null: as they were.  now: seconds.
  take(islands, now) {
    if (islands) this.seen.push({ at: now, islands: rowsOf(islands) });
    while (this.seen.length > 1 && this.seen[1].at < now - SPAN) this.seen.shift();
    this.draw(now);
  }

  draw(now) {
    const newest = this.seen.at(-1)?.islands ?? [];
    const count = newest.flat().length;
    const row = Math.max(1, Math.min(ROW, Math.floor(HIGH / Math.max(1, count))));
    const [wide, high] = [this.canvas.clientWidth, count * row + GAP * Math.max(0, newest.length - 1)];
    const scale = window.devicePixelRatio || 1;
    this.canvas.style.height = `${high}px`;
    this.canvas.width = Math.round(wide * scale);
    this.canvas.height = Math.round(high * scale);
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    const x = (at) => wide * Math.max(0, 1 - (now - at) / SPAN);
    for (const [n, { at, islands }] of this.seen.entries()) {
      const [left, right] = [x(at), x(this.seen[n + 1]?.at ?? now)];
      let top = 0;
      for (const rows of islands) {
        for (const { busy, colour } of rows) {
          pen.globalAlpha = Math.min(1, busy);
          pen.fillStyle = colour || "#808080";
          if (busy) pen.fillRect(left, top, right - left, row - (row > 2 ? 1 : 0));
          top += row;
        }
        top += GAP;
      }
    }
  }
}
