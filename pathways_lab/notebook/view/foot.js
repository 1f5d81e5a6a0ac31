// Below the figures of a live view: the overview of the record with its scrubber, a card, files.
// One script with page.js, which uses it; see live.py.

const THUMB = 8; // pixels from an end of the scrubber to where its first moment is

const HELP =
  "A click on a bar, or into a gap between two, tells of it below. Keys: space holds and follows, left and right go through the record, plus and minus zoom, " +
  "n and p choose the next and the previous gang, u unfolds and folds lanes, w shows the last runs or the whole window, " +
  "t shows the picture as text, s saves it as a file, escape lets go and follows. " +
  "After a click the wheel zooms, until escape. Shift and a drag sum up a stretch of time. " +
  "A double click lets go and follows, too.";

const SAVED_HELP =
  "Keys: plus and minus zoom, left and right go through the record, " +
  "n and p choose the next and the previous gang, t shows the picture as text, escape shows it as it was. " +
  "After a click the wheel zooms, until escape. A drag moves what is shown, and a double click shows it as it was.";

// A moment of the record: as long as the shortest window, and as its ticks.
const clock = (seconds) => `${seconds.toFixed(3)} s`;

// Facts as words of the page, without those that say nothing.  links: by label, the gangs that a
// text begins with, which a click chooses.
function told(facts, links = [], choose = undefined) {
  return facts
    .filter(([, text]) => text && text !== "???")
    .map(([label, text]) => {
      const part = element("span", "fact");
      if (label) part.appendChild(element("b", "", label));
      const named = links.find(([of]) => of === label)?.[1] ?? [];
      for (const [n, [name, gang]] of named.entries()) {
        const link = element("button", "link", name);
        link.title = "Tell of it, and frame it.";
        link.onclick = () => choose(gang);
        part.append(n ? ", " : "", link);
      }
      part.append(text.slice(named.map(([name]) => name).join(", ").length));
      return part;
    });
}

// Below the figures: a scrubber through the record, and a card that tells of the mark under the
// pointer, or else of the chosen gang.
class Foot {
  constructor(feed, seeks) {
    this.root = element("div", "foot");
    const track = this.root.appendChild(element("div", "track"));
    this.overview = track.appendChild(element("canvas", "overview"));
    this.overview.setAttribute("aria-hidden", "true"); // the scrubber below it does the same
    this.overview.title = "How busy devices were; the frame is what is shown above. A click goes there.";
    this.overview.onclick = ({ offsetX }) => {
      const [low, high] = [Number(this.slider.min), Number(this.slider.max)];
      const share = (offsetX - THUMB) / (this.overview.clientWidth - 2 * THUMB);
      this.go(Math.min(high, Math.max(low, low + share * (high - low))));
    };
    this.slider = track.appendChild(element("input", "scrubber"));
    this.slider.type = "range";
    this.slider.setAttribute("aria-label", "moment of the record, in seconds");
    this.slider.title = "Any moment of the record; at the right end the picture follows.";
    this.moment = this.root.appendChild(element("output", "moment"));
    this.card = element("div", "card");
    this.pointed = this.card.appendChild(element("div", "pointed"));
    this.chosen = this.card.appendChild(element("div", "chosen"));
    this.chosen.setAttribute("role", "status");
    this.saved = element("div", "saved");
    this.saved.setAttribute("role", "status");
    this.text = element("pre", "text");
    this.text.hidden = true;
    this.feed = feed;
    this.seeks = seeks;
    this.slider.oninput = () => this.go(Number(this.slider.value));
    this.point([]);
  }

  point(facts) {
    this.pointed.replaceChildren(...told(facts));
    this.pointed.hidden = !facts.length;
    this.chosen.hidden = !!facts.length;
  }

  show(header) {
    const [low, high] = header.moments;
    const active = this.due !== undefined || this.root.contains(document.activeElement) && header.at !== null;
    this.slider.min = low;
    this.slider.max = high;
    this.slider.step = Math.max((high - low) / 2000, 0.001);
    if (!active) this.slider.value = header.at ?? high;
    this.moment.textContent = clock(active ? Number(this.slider.value) : header.at ?? high);
    const chosen = JSON.stringify([header.chosen, header.links, header.place]);
    if (chosen === this.shown) return;
    this.shown = chosen;
    const parts = told(header.chosen, header.links, (gang) => this.feed.choose(gang));
    const line = parts.find((part) => part.firstChild.textContent === "line");
    line?.classList.add("pathways-lab-line");
    if (line && header.place) {
      const found = element("button", "fact pathways-lab-line");
      found.append(...line.childNodes);
      found.title = "Go to it in its cell.";
      found.onclick = () => this.feed.light(true);
      parts[parts.indexOf(line)] = found;
    }
    this.chosen.replaceChildren(...parts);
  }

  // All of the record above its scrubber: how busy devices were, and what the figures show of it.
  draw({ moments: [low, high], overview: [begin, length, parts], shown: [start, end] }) {
    const [wide, tall] = [this.overview.clientWidth, this.overview.clientHeight];
    const scale = window.devicePixelRatio || 1;
    const ink = getComputedStyle(this.root).getPropertyValue("--pathways-lab-ink").trim();
    const drawn = [low, high, start, end, begin, length, parts, wide, scale, ink].join();
    if (!wide || drawn === this.drawn) return;
    this.drawn = drawn;
    this.overview.width = Math.round(wide * scale);
    this.overview.height = Math.round(tall * scale);
    const pen = this.overview.getContext("2d");
    pen.scale(scale, scale);
    pen.fillStyle = pen.strokeStyle = ink;
    const x = (time) => THUMB + ((wide - 2 * THUMB) * (time - low)) / Math.max(high - low, 1e-9);
    const within = (time) => Math.min(wide - THUMB, Math.max(THUMB, x(time)));
    pen.globalAlpha = 0.45;
    for (const [n, part] of [...parts].entries()) {
      const [left, right] = [within(begin + n * length), within(begin + (n + 1) * length)];
      const high = (part / 9) * (tall - 4);
      pen.fillRect(left, tall - 2 - high, right - left, high);
    }
    pen.globalAlpha = 1;
    pen.lineWidth = 1.5;
    const [left, right] = [within(start), within(end)];
    pen.strokeRect(left - 1, 1, Math.max(right - left, 1) + 2, tall - 2);
  }

  // A file has come: it is the person's, who may look at it in Perfetto.
  save(name, buffer) {
    const address = URL.createObjectURL(new Blob([buffer], { type: "application/gzip" }));
    const link = Object.assign(element("a"), { href: address, download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(address), 60_000);
    const open = element("button", "button", "open in Perfetto");
    open.title = `A tab of ${PERFETTO}; the file goes from this tab to that one, and to no server.`;
    open.onclick = () => perfetto(name, buffer);
    this.saved.replaceChildren(`${name} is saved. `, open);
  }

  // The scrubber is where the figures are, and goes nowhere while they show everything.
  stand([start, end]) {
    const [low, high] = [Number(this.slider.min), Number(this.slider.max)];
    this.slider.disabled = end - start > 0.99 * (high - low);
    this.slider.value = (start + end) / 2;
    this.moment.textContent = clock((start + end) / 2);
  }

  // Moves are collected: a drag is many of them.
  go(moment) {
    const high = Number(this.slider.max);
    this.moment.textContent = clock(moment);
    this.wanted = moment >= high ? null : moment;
    this.slider.value = moment;
    this.seeks();
    this.due ??= setTimeout(() => {
      this.due = undefined;
      this.feed.act("seek", this.wanted);
    }, 60);
  }

  step(share) {
    const [low, high] = [Number(this.slider.min), Number(this.slider.max)];
    this.go(Math.min(high, Math.max(low, Number(this.slider.value) + share * (high - low))));
  }
}

const PERFETTO = "https://ui.perfetto.dev";

// Open a tab of Perfetto and hand it a trace once it answers.
function perfetto(title, buffer) {
  const tab = window.open(PERFETTO);
  if (!tab) return;
  const ask = setInterval(() => tab.closed ? end() : tab.postMessage("PING", PERFETTO), 100);
  const hear = ({ source, data }) => {
    if (source !== tab || data !== "PONG") return;
    end();
    tab.postMessage({ perfetto: { buffer, title, fileName: title } }, PERFETTO);
  };
  const end = () => (clearInterval(ask), removeEventListener("message", hear));
  addEventListener("message", hear);
}
