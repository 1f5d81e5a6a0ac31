// The side panel: islands, programs, clients, buttons.  It knows nothing of JupyterLab: it is
// given an element, a function that asks the server, and what its buttons do.

import { SPAN, Timeline } from "./timeline.js";

const QUICK = 500; // milliseconds between two questions while things happen
const SLOW = 2000; // ... and when nothing does, or there is no lab
const MISSES = 3; // questions without an answer, after which a lab that is still listed has ended
const SHOWN = "pathways-lab:shown"; // where a reload of the page finds which lab was shown
const OWN = "pathways-lab:own"; // ... and which was that of the notebook in front

const HELP = "No lab of yours runs on this machine. In a notebook:";
const START = "import pathways_lab as pw\nlab = pw.start()";

function make(tag, name, text) {
  const made = document.createElement(tag);
  if (name) made.className = `pathways-panel-${name}`;
  if (text !== undefined) made.textContent = text;
  return made;
}

const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
const percent = (share) => `${Math.round(100 * share)} %`;
const short = (name) => name.slice(name.lastIndexOf("/") + 1);

function size(bytes) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (bytes < 1024) return `${+bytes.toPrecision(3)} ${unit}`;
    bytes /= 1024;
  }
  return `${+bytes.toPrecision(3)} TiB`;
}

// A part of the panel that is built once and then only told what is different, so that the
// page does little and a pointer that rests on something does not lose it.
class List {
  constructor(root, create) {
    this.root = root;
    this.create = create;
    this.rows = new Map();
  }

  show(entries) {
    const seen = new Set();
    for (const entry of entries) {
      seen.add(entry.name);
      let row = this.rows.get(entry.name);
      if (!row) this.rows.set(entry.name, (row = this.create(entry)));
      if (row.node.parentNode !== this.root) this.root.append(row.node);
      row.update(entry);
    }
    for (const [name, row] of this.rows)
      if (!seen.has(name)) {
        row.node.remove();
        this.rows.delete(name);
      }
  }
}

function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

class Device {
  constructor(number) {
    this.node = make("div", "device");
    this.node.setAttribute("role", "img");
    this.number = this.node.appendChild(make("span", "number", String(number)));
    this.meter = this.node.appendChild(make("i", "meter"));
  }

  update(device, host, number) {
    this.node.dataset.state = host.lost ? "lost" : device.slice ? "held" : "free";
    this.meter.style.width = host.lost ? "0" : `${100 * device.busy}%`;
    this.meter.style.background = device.colour || "var(--jp-border-color1)";
    const state = host.lost ? `lost: ${host.lost}` : device.busy ? `busy ${percent(device.busy)}` : "idle";
    const lines = [
      `${host.name}, device ${number}: ${state}`,
      device.slice ? `${device.slice} of ${device.client}` : "free",
    ];
    if (device.work) lines.push(`last: ${device.work}`);
    if (device.memory) lines.push(`memory: ${size(device.memory)}`);
    const text = lines.join("\n");
    if (this.node.title !== text) {
      this.node.title = text;
      this.node.setAttribute("aria-label", lines.join(", "));
    }
  }
}

class Host {
  constructor() {
    this.node = make("div", "host");
    this.label = this.node.appendChild(make("span", "label"));
    this.place = this.node.appendChild(make("div", "devices"));
    this.devices = [];
  }

  update(host) {
    put(this.label, short(host.name));
    for (const gone of this.devices.splice(host.devices.length)) gone.node.remove(); // another lab's
    while (this.devices.length < host.devices.length) {
      const device = new Device(this.devices.length);
      this.devices.push(device);
      this.place.append(device.node);
    }
    host.devices.forEach((device, number) => this.devices[number].update(device, host, number));
  }
}

class Island {
  constructor() {
    this.node = make("section", "island");
    const head = this.node.appendChild(make("div", "row"));
    this.name = head.appendChild(make("b", "name"));
    this.about = head.appendChild(make("span", "about"));
    this.busy = head.appendChild(make("span", "value"));
    this.hosts = new List(this.node, () => new Host());
  }

  update(island) {
    const devices = island.hosts.reduce((sum, host) => sum + host.devices.length, 0);
    const kind = (island.hosts[0]?.kind ?? "").toUpperCase();
    put(this.name, island.name);
    put(this.about, `${devices} ${kind} ${devices === 1 ? "device" : "devices"}`);
    put(this.busy, percent(island.busy));
    this.hosts.show(island.hosts);
  }
}

// A line with a name, what is known of it, and a number at the right.
class Line {
  constructor() {
    this.node = make("div", "row");
    this.chip = this.node.appendChild(make("i", "chip"));
    this.name = this.node.appendChild(make("span", "name"));
    this.about = this.node.appendChild(make("span", "about"));
    this.value = this.node.appendChild(make("span", "value"));
  }

  update({ name, colour, about, value }) {
    this.chip.hidden = !colour;
    this.chip.style.background = colour ?? "";
    put(this.name, name);
    put(this.about, about);
    put(this.value, value);
    const text = `${name} · ${about} · ${value} devices in use`;
    if (this.node.title !== text) this.node.title = text;
  }
}

export class Panel {
  // ask(path): JSON from the server's list of labs, null when nothing is new.
  // open(): show all of the lab in a tab.
  // kernels: current(), the number of the kernel of the notebook in front, or null;
  // notebook(number): what its notebook is called, if that is known.
  constructor(node, ask, open, kernels) {
    this.node = node;
    this.ask = ask;
    this.kernels = kernels;
    this.labs = []; // as last listed
    this.own = sessionStorage.getItem(OWN); // lab of the notebook that was in front, when it had one
    this.lab = null; // name of the lab that is shown, until it ends
    this.silent = new Set(); // labs that do not answer
    this.misses = 0;
    this.number = 0;
    this.running = 0;
    node.append(make("header", "title", "Pathways Lab"));
    this.which = node.appendChild(make("div", "which"));
    this.choice = node.appendChild(make("select", "choice"));
    this.choice.setAttribute("aria-label", "lab");
    this.choice.onchange = () => {
      this.silent.delete(this.choice.value);
      this.choose(this.choice.value);
    };
    this.help = node.appendChild(make("div", "help"));
    this.help.append(make("p", "", HELP), make("pre", "", START));
    this.body = node.appendChild(make("div", "body"));
    this.notes = this.body.appendChild(make("div", "notes"));
    const late = this.part("Timeline", `devices, last ${SPAN} s`);
    this.timeline = new Timeline(late.appendChild(make("canvas", "timeline")));
    this.timeline.canvas.setAttribute("role", "img");
    this.timeline.canvas.setAttribute("aria-label", "what devices did of late; the islands below say it in words");
    this.islands = new List(this.part("Islands", "busy, last half second"), () => new Island());
    this.programs = new List(this.part("Programs", "devices in use"), () => new Line());
    this.idle = this.programs.root.appendChild(make("div", "none", "nothing runs"));
    this.clients = new List(this.part("Clients", "devices in use"), () => new Line());
    this.body.appendChild(make("button", "open", "Open full view")).onclick = () => open();
    this.show(null);
  }

  part(title, note) {
    const part = this.body.appendChild(make("section", "part"));
    const head = part.appendChild(make("h3", "head", title));
    head.append(make("small", "", note));
    return part.appendChild(make("div", "list"));
  }

  // Ask from now on, until end().
  begin() {
    this.end();
    this.follow(++this.running);
  }

  end() {
    this.running += 1;
  }

  async follow(turn) {
    let listed = -Infinity;
    while (turn === this.running) {
      let wait = SLOW;
      let lab = null;
      try {
        if (!this.lab || performance.now() - listed > 2 * SLOW) {
          await this.find();
          listed = performance.now();
        } else this.follows();
        lab = this.lab;
        if (lab) {
          const news = await this.ask(`/${lab}/pathways-lab/state?since=${this.number}`);
          if (news?.gone) throw new Error(`${lab} has ended`);
          if (lab === this.lab) this.misses = 0;
          if (lab === this.lab && turn === this.running) {
            if (news) this.show(news);
            this.timeline.take(news?.islands ?? null, performance.now() / 1000);
          }
          wait = news ? QUICK : 2 * QUICK;
        }
      } catch {
        // The lab has ended, or it or the server cannot answer for a moment: who is there?
        listed = -Infinity;
        this.number = 0; // what it says next is shown, though it may be what it said before
        if (lab) await this.find().catch(() => {});
        if (lab && (lab !== this.lab || ++this.misses === 1)) wait = QUICK; // it is being closed?
        else {
          put(this.notes, "the lab does not answer");
          if (lab && this.misses >= MISSES) {
            this.silent.add(lab);
            this.choose(null);
          }
        }
      }
      if (document.hidden) wait = 2 * SLOW;
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
  }

  // The lab to show, of those that are there now; null: there is none.
  async find() {
    this.list((await this.ask("")).labs);
    return this.lab;
  }

  list(labs) {
    this.labs = labs;
    const names = labs.map((lab) => lab.name);
    if (names.every((name) => this.silent.has(name))) this.silent.clear(); // ask them again
    const known = this.lab ?? sessionStorage.getItem(SHOWN);
    const newest = names.find((name) => !this.silent.has(name)) ?? null;
    this.choose(names.includes(known) && !this.silent.has(known) ? known : newest);
    this.follows();
  }

  // Another notebook comes to the front, or this one has another lab: its lab is shown.
  // What somebody has chosen stays until then.
  follows() {
    const kernel = this.kernels.current();
    const opened = (lab) => lab.kernels[kernel] ?? 0;
    const [own] = this.labs
      .filter((lab) => opened(lab) && !this.silent.has(lab.name))
      .sort((a, b) => opened(b) - opened(a));
    if (own && own.name !== this.own) {
      this.own = own.name;
      sessionStorage.setItem(OWN, own.name);
      this.choose(own.name);
    }
    const texts = this.labs.map((lab) => this.called(lab) + (lab === own ? " (this notebook)" : ""));
    const shown = JSON.stringify([this.labs, texts]);
    if (shown !== this.shown) {
      this.shown = shown;
      this.choice.hidden = texts.length < 2;
      this.which.hidden = texts.length !== 1;
      put(this.which, texts[0] ?? "");
      this.choice.replaceChildren(
        ...this.labs.map(({ name }, at) => {
          const option = make("option", "", texts[at]);
          option.value = name;
          return option;
        }),
      );
    }
    if (this.lab) this.choice.value = this.lab;
  }

  // A lab by its notebooks and its start.
  called({ kernels, started }) {
    const notebooks = Object.keys(kernels).map((number) => this.kernels.notebook(number));
    const names = [...new Set(notebooks)].filter(Boolean).sort().join(", ");
    const at = new Date(1000 * started);
    const today = at.toDateString() === new Date().toDateString();
    return `${names || "lab"}, started ${today ? at.toLocaleTimeString() : at.toLocaleString()}`;
  }

  // What the lab that is shown is called.
  get title() {
    const lab = this.labs.find(({ name }) => name === this.lab);
    return lab ? this.called(lab) : "";
  }

  choose(lab) {
    if (lab === this.lab) return;
    this.lab = lab;
    this.number = this.misses = 0;
    this.timeline.clear();
    this.help.hidden = !!lab; // it may take a moment to say something
    if (lab) sessionStorage.setItem(SHOWN, lab);
    else this.show(null);
  }

  show(state) {
    this.help.hidden = !!state;
    this.body.hidden = !state;
    if (!state) return;
    this.number = state.number;
    const notes = [...state.notes];
    if (state.dropped) notes.push(`${state.dropped.toLocaleString("en")} records dropped`);
    put(this.notes, notes.join(" · "));
    this.islands.show(state.islands);
    this.programs.show(
      state.programs.map(({ name, client, colour, using, waiting }) => ({
        name, colour, about: waiting ? `${client} · ${waiting.toLocaleString("en")} to go` : client,
        value: using.toFixed(1),
      })),
    );
    this.idle.hidden = state.programs.length > 0;
    this.clients.show(
      state.clients.map(({ name, slices, devices, using }) => ({
        name, about: `${plural(slices, "slice")}, ${plural(devices, "device")}`,
        value: using.toFixed(1),
      })),
    );
  }
}
