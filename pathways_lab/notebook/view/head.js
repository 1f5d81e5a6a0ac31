// The head of a live view: its title, what it says of itself, buttons, legend and advice.  One
// script with page.js, which shows it.

const LATE = 1; // seconds by which a picture may be behind without a word
const GANG = "A gang is one call of a compiled function, on all devices of its slice at once.";

const TITLES = {
  cancel: "End the runs that this view shows.",
  clear: "Forget what was until now.",
};

// The header: text of the page, rebuilt only when it changes.
class Head {
  constructor(send) {
    this.root = element("div", "head");
    this.title = this.root.appendChild(element("span", "title"));
    this.state = this.root.appendChild(element("span", "state"));
    this.progress = this.root.appendChild(element("progress", "progress"));
    this.progress.setAttribute("aria-label", "share of the gangs that is done");
    this.status = this.root.appendChild(element("span", "status"));
    this.status.title = GANG;
    this.compiling = this.root.appendChild(element("span", "compiling"));
    this.behind = this.root.appendChild(element("span", "behind"));
    this.notes = this.root.appendChild(element("span", "notes"));
    this.tools = this.root.appendChild(element("span", "tools"));
    this.buttons = this.tools.appendChild(element("span", "buttons"));
    this.legend = element("div", "legend");
    this.advice = element("div", "advice");
    this.parts = [this.root, this.legend, this.advice];
    this.send = send;
  }

  // header: as it came *age* seconds ago.
  show(header, age) {
    // Lines that were there once stay: what is below must not move under the pointer.
    // All are read before any is set, since each reading after a setting lays the page out again.
    const heights = this.parts.map((part) => part.offsetHeight);
    this.parts.forEach((part, n) => (part.style.minHeight = `${heights[n]}px`));
    this.title.textContent = header.title;
    // What was asked for is under way until the lab says how it ended.
    const state = this.cancelled && header.actions.includes("cancel") ? "cancelling" : header.state;
    this.state.textContent = this.state.dataset.state = state;
    this.count(header, age);
    const status = [header.status, header.shares].filter(Boolean).join(" · ");
    this.status.textContent = header.at === null ? status : ""; // room for what follows
    this.progress.hidden = header.progress < 0;
    if (header.progress >= 0) this.progress.value = header.progress;
    this.notes.replaceChildren(...header.notes.map((note) => element("span", "note", note)));
    if (this.advice.title !== header.advice)
      this.advice.textContent = this.advice.title = header.advice;
    const actions = header.actions.join(" ");
    if (actions !== this.actions) {
      this.actions = actions;
      this.buttons.replaceChildren(...header.actions.map((name) => this.button(name)));
    }
    const legend = JSON.stringify(header.legend);
    if (legend !== this.shown) {
      this.shown = legend;
      this.legend.replaceChildren(...header.legend.map(([program, nodes]) => Head.entry(program, nodes)));
    }
  }

  // At another width of the page there are other lines.
  fit(width) {
    if (width !== this.width) for (const part of this.parts) part.style.minHeight = "";
    this.width = width;
  }

  // What goes on with time, also while nothing comes.
  count(header, age) {
    const [name, number, total, seconds] = header.compiling ?? [];
    const now = performance.now() / 1000;
    if (`${name} ${number}` !== this.made) this.since = now;
    this.made = `${name} ${number}`;
    this.since = Math.min(this.since, now - seconds);
    const took = header.at === null ? (now - this.since).toFixed(1) : seconds;
    this.compiling.textContent = name ? `compiling ${name}, ${number} of ${total}, ${took} s` : "";
    const late = header.late + (header.state === "running" && age > LATE ? age : 0);
    const held = header.at !== null && `held at ${clock(header.at)}; Esc goes on`;
    this.behind.textContent = held || (late >= LATE ? `picture ${Math.round(late)} s behind` : "");
  }

  button(name) {
    const made = element("button", "button", name);
    made.title = TITLES[name] ?? "";
    made.onclick = () => {
      if (name === "cancel") {
        made.disabled = this.cancelled = true;
        this.state.textContent = this.state.dataset.state = "cancelling";
      }
      this.send(name);
    };
    return made;
  }

  static entry(program, nodes) {
    const entry = element("span", "program");
    entry.appendChild(element("b", "", program));
    for (const [name, colour] of nodes) {
      const chip = entry.appendChild(element("span", "chip"));
      const swatch = chip.appendChild(element("i", "swatch"));
      swatch.style.background = colour;
      chip.appendChild(document.createTextNode(name));
    }
    return entry;
  }
}
