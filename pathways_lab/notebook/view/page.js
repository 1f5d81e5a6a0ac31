// What a person sees of a live view, and what they can do with it: head, figures,
// the chosen gang, keys, text.  One script with foot.js and head.js, and with live.js, which follows
// and has apply() and the feed; see live.py.

function element(tag, name, text) {
  const made = document.createElement(tag);
  if (name) made.className = `pathways-lab-${name}`;
  if (text !== undefined) made.textContent = text;
  return made;
}

// Takes a document of Bokeh's out of the page.
function wipe(shown) {
  try {
    shown?.clear();
  } catch {
    // a document whose views are gone has nothing left to clear
  }
}

const TICK = 200; // milliseconds between two looks at the clock

const LANE =
  "A lane is devices that do alike; s1 is slice 1, a mesh of devices that functions are placed on. " +
  "A click unfolds the lane, or folds it again.";
const WAITS = ["queues-waits", "queues-waits-open"];
const HIGH = [-0.62, 0.34]; // of a wait and its name, in lanes from the middle of its own

const SPEED = 600; // pixels of the wheel that zoom by a factor of e
const MARGINS = 258; // pixels beside the drawing area: LEFT and RIGHT of plot.py
const ruler = document.createElement("canvas").getContext("2d");
ruler.font = "bold 12px system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif";

// One place in the page where the document is shown.
// The bars of two computations that an arrow leads from and to: that in the lane of a wait, else near
// the last bar, and the last one that ended before it, for hosts end at different times.
function between(from, to, lane) {
  const latest = (bars) => bars.reduce((a, b) => (b.right > a.right ? b : a));
  const near = lane ?? latest(from).y;
  const first = to.reduce((a, b) => (Math.abs(b.y - near) < Math.abs(a.y - near) ? b : a));
  const before = from.filter(({ right }) => right <= first.left);
  return [latest(before.length ? before : from), first];
}

class View {
  constructor(feed, host) {
    this.feed = feed;
    this.root = host.appendChild(element("div"));
    this.root.className = "pathways-lab";
    this.root.tabIndex = 0;
    this.root.setAttribute("role", "group");
    this.root.title = "";
    this.root.dataset.shown = ""; // nothing, until the first picture has come
    const send = (name, value) => feed.act(name, value);
    this.head = new Head(send);
    this.foot = new Foot(feed, () => this.seeks());
    this.pause = element("button", "button", "pause");
    this.pause.title = "Hold the picture to look at it; dragging it does so too.";
    this.pause.onclick = () => (this.resting ? this.follow() : this.hold());
    this.reader = element("button", "button", "text");
    this.reader.title = "The picture as text, and what keys do.";
    this.reader.setAttribute("aria-expanded", "false");
    this.reader.onclick = () => this.read();
    this.keep = element("button", "button", "save");
    this.keep.title = "Save the record of this view as a file, for Perfetto.";
    this.keep.onclick = () => this.save();
    this.other = element("button", "button");
    this.other.title = "Show the last runs, or the whole window.";
    this.other.onclick = () => feed.act("window");
    this.head.tools.append(this.reader, this.keep, this.other, this.pause);
    this.body = element("div", "body");
    this.body.setAttribute("role", "img");
    this.stretch = element("div", "stretch");
    this.body.addEventListener("pointerdown", (event) => this.press(event), true);
    this.body.addEventListener("pointermove", (event) => {
      if (event.buttons === 1 && Math.abs(event.clientX - this.from) > 4) this.hold();
    });
    this.body.addEventListener("dblclick", () => this.resting && this.follow());
    this.body.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.root.addEventListener("keydown", (event) => this.key(event));
    this.root.append(
      this.head.root, this.head.legend, this.head.advice, this.body,
      this.foot.root, this.foot.card, this.foot.saved, this.foot.text,
    );
    this.paused = false;
    this.clock = setInterval(() => {
      if (feed.header && !feed.frozen && !document.hidden) this.head.count(this.told, feed.age);
    }, TICK);
    this.fitted = [];
    this.size = new ResizeObserver(() => requestAnimationFrame(() => {
      this.head.fit(this.body.clientWidth);
      this.fit();
      if (feed.header && !feed.frozen) this.frame();
      // Figures that were measured in a moment without styles, as a theme changes, have no size.
      if (this.body.clientWidth === this.wide) return; // figures have made themselves higher
      this.wide = this.body.clientWidth;
      for (const root of this.placed?.roots() ?? []) feed.Bokeh.index.find_one(root)?.invalidate_layout();
    }));
    this.size.observe(this.body);
    this.watch = new MutationObserver(() => requestAnimationFrame(() => this.paint()));
    this.watch.observe(document.body, {
      attributes: true,
      attributeFilter: ["data-jp-theme-name", "data-jp-theme-light", "class"],
    });
  }

  async show() {
    const { feed } = this;
    if (feed.frozen) return this.freeze(feed.frozen);
    if (!feed.document) return; // the first snapshot is on its way
    const shown = (this.showing = Symbol("shown"));
    const copy = feed.load(feed.document.to_json());
    const place = element("div");
    this.body.style.minHeight = `${this.body.offsetHeight}px`;
    this.document = copy;
    this.header(feed.header);
    await feed.Bokeh.require("embed/standalone").add_document_standalone(copy, place);
    if (shown !== this.showing) return wipe(copy); // a newer one overtook this one
    this.body.replaceChildren(place);
    this.body.style.minHeight = "";
    wipe(this.placed);
    this.placed = copy;
    this.tapped = copy.get_model_by_name("queues");
    this.root.pathwaysDocument = copy;
    this.root.dataset.scripts = feed.how;
    for (const model of copy._all_models.values()) {
      if (!/Figure$/.test(model.type)) continue;
      model.on_event("tap", (event) => this.tap(model, event));
      model.on_event("mousemove", () => requestAnimationFrame(() => this.point(model)));
      model.on_event("mouseleave", () => this.foot.point([]));
      // Keys are the view's own: a figure would be one more stop of the Tab key, without a name.
      const drawn = feed.Bokeh.index.find_one(model);
      const events = drawn?.canvas_view.events_el;
      if (!events) continue;
      events.tabIndex = -1;
      events.style.outline = "none";
      // The name of a lane, beside the drawing area, folds and unfolds it.
      const { frame } = drawn;
      if (model.name !== "queues" || feed.silent) continue;
      const beside = ({ offsetX }) => offsetX < frame.bbox.left;
      events.addEventListener("click", (event) => {
        if (beside(event)) feed.act("fold", frame.y_scale.invert(event.offsetY));
      });
      events.addEventListener("pointermove", (event) => {
        events.title = beside(event) ? LANE : "";
      });
    }
    this.fitted = [...copy._all_models.values()]
      .filter(({ type }) => /Figure$/.test(type))
      .flatMap(({ renderers, x_range }) => renderers.map(({ data_source }) => [data_source, x_range]))
      .filter(([source]) => source?.data.choices);
    const time = copy.get_model_by_name("time");
    if (feed.saved && !time) this.foot.root.remove(); // there is nothing to go through
    time?.change.connect(() => {
      this.fit();
      this.frame();
    });
    this.fit();
    this.mark();
    this.paint();
  }

  // Texts are as long as there is room for, here and now and at this zoom.
  fit() {
    const frame = this.body.clientWidth - MARGINS;
    if (!this.document || frame <= 0) return;
    for (const [source, { name, start, end }] of this.fitted) {
      const across = name === "time" ? (frame * this.covered) / (end - start) : frame;
      const { choices, room, text } = source.data;
      const fits = (words, share) =>
        words.find((word) => ruler.measureText(word).width < share * across) ?? words.at(-1);
      const chosen = choices.map((words, at) => fits(words, room[at]));
      if (chosen.some((word, at) => word !== text[at])) source.data = { ...source.data, text: chosen };
    }
  }

  apply(changes) {
    if (this.paused || !this.document) return;
    apply(this.document, changes);
    this.fit();
    if (this.feed.chosen !== null) this.mark();
  }

  header(header) {
    // A picture that is held keeps what explains it.
    const told = (this.told = { ...header, ...(this.paused && this.held) });
    // Its scrubber stands with it.
    this.stood = told.at === null ? null : this.stood ?? { moments: told.moments, overview: told.overview };
    Object.assign(told, this.stood);
    this.root.dataset.shown = header.state;
    this.head.show(told, this.feed.age);
    this.foot.show(told);
    this.frame();
    this.feed.light();
    this.covered = told.shown[1] - told.shown[0];
    const { saved, silent, help } = this.feed;
    this.resting = saved ? this.paused : told.at !== null;
    this.pause.textContent = saved ? "reset" : this.resting ? "follow" : "pause";
    this.pause.hidden = saved && !this.resting;
    this.keep.hidden = silent;
    this.other.textContent = header.window;
    this.other.hidden = !header.window || silent;
    const arrows = JSON.stringify(told.arrows);
    if (arrows !== this.pointing) this.mark();
    this.pointing = arrows;
    this.root.setAttribute("aria-label", `${header.title}. ${help}`);
    this.body.setAttribute("aria-label", told.summary);
  }

  hold() {
    if (this.paused || this.feed.frozen) return;
    this.paused = true;
    if (this.feed.saved) return this.header(this.feed.header); // nothing in it would move
    const { legend, advice, summary, shown, moments, at } = this.feed.header;
    this.held = { legend, advice, summary, shown, at: at ?? Math.min(moments[1], shown[1]) };
    this.header(this.feed.header);
    for (const [source] of this.fitted) {
      if (!source.name.endsWith("-ahead")) continue;
      source.data = { ...source.data, choices: source.data.choices.map(([word]) => [word && "held", ""]) };
    }
    this.fit();
  }

  follow() {
    const sought = this.feed.header.at !== null;
    this.stretch.remove();
    this.paused = false;
    if (sought) this.feed.act("seek", null);
    this.header(this.feed.header);
    this.show();
  }

  // A moment of the record is wanted: what was held is shown again.
  seeks() {
    if (!this.paused || this.feed.saved) return;
    this.paused = false;
    this.show();
  }

  // --- one gang in all panels -----------------------------------------------

  // The newest mark at a point of a figure that is one gang, or else the wait there.
  tap(figure, { x, y }) {
    let found = null;
    this.tapped = figure;
    for (const { data_source } of figure.renderers) {
      const data = data_source?.data;
      if (!data?.gang || !data.left || WAITS.includes(data_source.name)) continue;
      for (let i = 0; i < data.gang.length; i++) {
        const [top, bottom] = [Math.min(data.top[i], data.bottom[i]), Math.max(data.top[i], data.bottom[i])];
        if (data.gang[i] >= 0 && data.left[i] <= x && x <= data.right[i] && top <= y && y <= bottom)
          found = data.gang[i];
      }
    }
    if (found === null && figure.name === "queues") {
      const { ticks } = this.document.get_model_by_name("queues-rows").ticker;
      const point = [x, ticks.find((lane) => Math.abs(lane - y) < 0.5) ?? y];
      if (this.waits(point).length) found = point;
    }
    this.feed.choose(found);
  }

  // From when to when waits are that a lane has at a moment.
  waits([moment, lane]) {
    const found = [];
    for (const name of WAITS) {
      const { left, right, top, bottom } = this.document?.get_model_by_name(name)?.data ?? { left: [] };
      for (let i = 0; i < left.length; i++)
        if (left[i] <= moment && moment <= right[i] && Math.abs((top[i] + bottom[i]) / 2 - lane) < 0.4)
          found.push([left[i], right[i]]);
    }
    return found;
  }

  // A figure that has the axis of time, as the page draws it.
  timed() {
    const timed = [...(this.document?._all_models.values() ?? [])].find((m) => m.x_range?.name === "time");
    return timed && this.feed.Bokeh.index.find_one(timed);
  }

  // After a click the wheel zooms at the pointer, until Escape: the page has it back.
  wheel(event) {
    const view = this.wheels && this.timed();
    if (!view) return;
    event.preventDefault();
    const { x_scale } = view.frame;
    const at = x_scale.invert(event.clientX - view.el.getBoundingClientRect().left);
    this.zoom(Math.exp(event.deltaY / SPEED), at);
  }

  // A drag with Shift sums up a stretch of time, in every figure that has the axis of time.
  press(event) {
    this.from = event.clientX;
    this.wheels = true;
    this.stretch.remove();
    const view = this.timed();
    if (!event.shiftKey || !view || this.feed.silent) return;
    event.stopPropagation(); // from Bokeh, which would pan
    this.hold();
    const { bbox, x_scale } = view.frame;
    const left = view.el.getBoundingClientRect().left;
    const inside = (x) => Math.min(bbox.right, Math.max(bbox.left, x - left));
    const begin = inside(event.clientX);
    this.body.append(this.stretch);
    this.foot.point([]);
    const end = new AbortController();
    const move = ({ clientX }) => {
      const [low, high] = [begin, inside(clientX)].sort((a, b) => a - b);
      const beside = left - this.body.getBoundingClientRect().left;
      Object.assign(this.stretch.style, { left: `${beside + low}px`, width: `${high - low}px` });
      return [low, high].map((x) => x_scale.invert(x));
    };
    move(event);
    addEventListener("pointermove", move, end);
    addEventListener("pointerup", (up) => {
      end.abort();
      this.feed.act("sum", move(up));
    }, end);
  }

  // Tell of the mark under the pointer: of the newest layer that has one.  A stretch has its sums
  // there.
  point(figure) {
    if (this.stretch.isConnected) return;
    this.foot.point(this.facts(figure, (renderer) =>
      renderer.get_selection_manager().inspectors.get(renderer)?.indices.at(-1)));
  }

  // The facts about a mark of a figure, by its newest layer in which *find* has its number.
  facts(figure, find) {
    const { replace_placeholders } = this.feed.Bokeh.require("core/util/templating");
    for (const { type, renderers, tags, formatters } of figure.toolbar.tools.toReversed()) {
      if (type !== "HoverTool") continue;
      const [renderer] = renderers;
      const at = find(renderer);
      if (at === undefined) continue;
      const text = (template) => replace_placeholders(template, renderer.data_source, at, formatters);
      return tags.map(([label, template]) => [label, text(template)]);
    }
    return [];
  }

  // The facts about a gang, by the figure that was clicked, or else by the first that has some.
  about(gang) {
    const find = ({ data_source: { data } }) => {
      const at = data.gang?.lastIndexOf(gang) ?? -1;
      return at < 0 ? undefined : at;
    };
    const figures = [...(this.document?._all_models.values() ?? [])].filter(({ type }) => /Figure$/.test(type));
    for (const figure of [this.tapped, ...figures]) {
      const facts = figure ? this.facts(figure, find) : [];
      if (facts.length) return facts;
    }
    return [];
  }

  // Frame whatever is the chosen gang or wait; the sources of frames are this view's own.
  mark() {
    if (!this.document) return;
    const { chosen } = this.feed;
    const gang = Array.isArray(chosen) ? null : chosen;
    this.root.dataset.gang = gang ?? "";
    for (const figure of this.document._all_models.values()) {
      if (!/Figure$/.test(figure.type)) continue;
      const frames = this.document.get_model_by_name(`${figure.name}-chosen`);
      if (!frames) continue;
      const out = { left: [], right: [], top: [], bottom: [] };
      for (const renderer of gang === null ? [] : figure.renderers) {
        const data = renderer.data_source?.data;
        for (let i = 0; i < (data?.gang?.length ?? 0); i++)
          if (data.gang[i] === gang) for (const name in out) out[name].push(data[name][i]);
      }
      if (gang !== chosen && figure.name === "queues")
        for (const [left, right] of this.waits(chosen)) {
          const frame = { left, right, top: chosen[1] + HIGH[0], bottom: chosen[1] + HIGH[1] };
          for (const name in out) out[name].push(frame[name]);
        }
      if (out.left.length || frames.data.left.length) frames.data = out;
    }
    this.connect(chosen);
  }

  // Thin arrows from the bars of computations to those of others that use their results.
  connect(chosen) {
    const arrows = this.document.get_model_by_name("queues-arrows");
    if (!arrows) return;
    const pairs = (this.told?.arrows ?? []).filter((pair) => pair.includes(chosen) || chosen?.length);
    const bars = new Map(pairs.flat().map((gang) => [gang, []]));
    for (const name of bars.size ? ["queues-bars", "queues-open"] : []) {
      const { gang, left, right, top, bottom } = this.document.get_model_by_name(name).data;
      for (let i = 0; i < gang.length; i++)
        bars.get(gang[i])?.push({ left: left[i], right: right[i], y: (top[i] + bottom[i]) / 2 });
    }
    const out = { x0: [], y0: [], x1: [], y1: [], cx0: [], cx1: [] };
    const { start, end } = this.document.get_model_by_name("time");
    for (const [from, to] of pairs.map((pair) => pair.map((gang) => bars.get(gang)))) {
      if (!from.length || !to.length) continue;
      const [last, first] = between(from, to, Array.isArray(chosen) ? chosen[1] : null);
      const bend = Math.max((first.left - last.right) / 2, (end - start) / 60);
      const [x0, x1] = [last.right, first.left];
      const arrow = { x0, x1, y0: last.y, y1: first.y, cx0: x0 + bend, cx1: x1 - bend };
      for (const name in out) out[name].push(arrow[name]);
    }
    if (out.x0.length || arrows.data.x0.length) arrows.data = out;
  }

  next(forward) {
    const seen = new Map();
    for (const name of ["queues-bars", "queues-open", "order-done", "order-launched", "order-running"]) {
      const data = this.document?.get_model_by_name(name)?.data;
      if (!data?.gang || (seen.size && name.startsWith("order"))) continue;
      for (let i = 0; i < data.gang.length; i++)
        if (data.gang[i] >= 0 && !seen.has(data.gang[i])) seen.set(data.gang[i], data.left[i]);
    }
    const gangs = [...seen.keys()].sort((a, b) => seen.get(a) - seen.get(b));
    const at = gangs.indexOf(this.feed.chosen);
    const to = at < 0 ? gangs.length - 1 : at + (forward ? 1 : -1);
    if (gangs[to] !== undefined) this.feed.choose(gangs[to]);
  }

  // --- keys, text -------------------------------------------------------------

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const slider = event.target === this.foot.slider;
    const inside = event.target.tagName === "BUTTON" || slider;
    const keys = {
      ArrowLeft: () => slider || this.foot.step(event.shiftKey ? -0.1 : -0.01),
      ArrowRight: () => slider || this.foot.step(event.shiftKey ? 0.1 : 0.01),
      " ": () => inside || (this.resting ? this.follow() : this.hold()),
      "+": () => this.zoom(0.5),
      "-": () => this.zoom(2),
      n: () => this.next(true),
      p: () => this.next(false),
      s: () => this.save(),
      t: () => this.read(),
      w: () => this.feed.act("window"),
      u: () => this.feed.act("fold"),
      Escape: () => this.letGo(),
    };
    if (!keys[event.key]) return;
    event.stopPropagation(); // the notebook has commands on the same keys
    if (keys[event.key]() !== true) event.preventDefault();
  }

  letGo() {
    this.wheels = false;
    this.stretch.remove();
    this.feed.choose(null);
    if (this.resting) this.follow();
  }

  // at: the moment that stays where it is.
  zoom(factor, at) {
    const range = this.document?.get_model_by_name("time");
    if (!range) return;
    this.hold();
    const { start, end } = range;
    const fixed = at ?? (start + end) / 2;
    range.setv({ start: fixed - factor * (fixed - start), end: fixed + factor * (end - fixed) });
  }

  // Show the moment in the middle, in as much time as now, as far as the record goes.
  go(moment) {
    const range = this.document?.get_model_by_name("time");
    if (!range || this.foot.slider.disabled) return this.frame();
    const [low, high] = this.told.moments;
    const length = range.end - range.start;
    const start = Math.max(low, Math.min(high - length, moment - length / 2));
    this.hold();
    range.setv({ start, end: start + length });
  }

  // The frame in the overview is around what the figures show, zoomed or not.
  frame() {
    const range = this.paused && this.document?.get_model_by_name("time");
    const shown = range ? [range.start, range.end] : this.told.shown;
    this.foot.draw({ ...this.told, shown });
    if (this.feed.saved) this.foot.stand(shown);
  }

  read() {
    const { text } = this.foot;
    text.hidden = !text.hidden;
    this.reader.setAttribute("aria-expanded", String(!text.hidden));
    clearInterval(this.reading);
    if (text.hidden) return;
    this.feed.act("text");
    this.reading = setInterval(() => this.feed.act("text"), 2000);
  }

  save() {
    this.feed.saver = this;
    this.feed.act("save");
  }

  // Canvases do not restyle themselves, and glyphs know no page variables.
  paint() {
    if (!this.document || this.feed.frozen) return;
    this.frame();
    const ink = getComputedStyle(this.root).getPropertyValue("--pathways-lab-ink").trim();
    for (const model of this.document._all_models.values()) {
      if (ink && model.tags?.includes("theme-ink")) {
        for (const part of ["text_color", "line_color"])
          if (part in model) model[part] = { value: ink };
        if (model.type === "Scatter") model.fill_color = { value: ink };
      } else if (/Figure$/.test(model.type)) model.change.emit();
    }
  }

  freeze(bundle) {
    this.showing = null;
    this.root.dataset.shown = "frozen";
    this.drop();
    const picture = element("div");
    picture.innerHTML = bundle.data["text/html"];
    this.root.replaceChildren(picture);
  }

  drop() {
    clearInterval(this.reading);
    clearInterval(this.clock);
    wipe(this.placed);
    this.document = this.placed = undefined;
  }

  remove() {
    this.watch.disconnect();
    this.size.disconnect();
    this.drop();
    this.feed.left(this);
    this.feed.light();
  }
}
