// Live figures: one message per update, snapshots that name the message they
// contain, and a copy of the document per view, so that a second view, a late one
// or one that was paused shows the present.  See live.py and encode.py.

const REST = 2, LEAST = 0.25; // a page rests so many times as long as drawing took, or at least
const ALIVE = 500; // milliseconds from one drawing to the next, where the least leaves room for them
const FRAMES = 34; // milliseconds from the wish to draw to the end of drawing, when a page is quick
const SCRIPTS = "__pathwaysLabScripts"; // attempts to load BokehJS, by version

function serverBase() {
  const element = document.getElementById("jupyter-config-data");
  if (!element) return null; // not a Jupyter page: there is no server to ask
  try {
    return JSON.parse(element.textContent).baseUrl || "/";
  } catch {
    return null;
  }
}

function addScript(source) {
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = source;
    script.async = false;
    script.onload = () => resolve();
    script.onerror = () => reject(new Error(`cannot load ${source}`));
    document.head.appendChild(script);
  });
}

async function loadAll(sources, version) {
  const other = window.Bokeh;
  for (const source of sources) await addScript(source);
  const loaded = window.Bokeh;
  if (other && other !== loaded) window.Bokeh = other; // leave another version as it was
  if (!loaded || (version && loaded.version !== version))
    throw new Error(`BokehJS is ${loaded?.version}, the kernel's Bokeh ${version}`);
  return loaded;
}

async function fromServer({ version, files, route }) {
  const base = serverBase();
  if (base === null || !route) throw new Error("this page has no route to BokehJS");
  return loadAll(
    files.map((file) => `${base}${route}/${file}${version && `?v=${version}`}`),
    version,
  );
}

async function fromKernel(buffers, version) {
  const urls = buffers.map((b) => URL.createObjectURL(new Blob([b], { type: "text/javascript" })));
  try {
    return await loadAll(urls, version);
  } finally {
    urls.forEach((url) => URL.revokeObjectURL(url));
  }
}

// BokehJS from the page or the server.  One attempt per page and version; "": any version.
async function found(scripts) {
  const { version } = scripts;
  if (window.Bokeh && [window.Bokeh.version, ""].includes(version))
    return { Bokeh: window.Bokeh, how: "page" };
  const attempt = attemptFor(version);
  attempt.loading ??= fromServer(scripts).then((Bokeh) => ({ Bokeh, how: "server" }));
  return attempt.loading;
}

// ... or else from the kernel.  It is asked, and may also send the scripts unasked (a busy one
// cannot be asked), to whichever model.
function bokeh(model) {
  const scripts = model.get("_scripts");
  return found(scripts).catch(async () => {
    const attempt = attemptFor(scripts.version);
    model.send({ type: "scripts" });
    attempt.loaded ??= attempt.pushed.then((buffers) => fromKernel(buffers, scripts.version));
    return { Bokeh: await attempt.loaded, how: "kernel" };
  });
}

function attemptFor(version) {
  const attempts = (window[SCRIPTS] ??= new Map());
  if (!attempts.has(version)) {
    const attempt = {};
    attempt.pushed = new Promise((resolve) => (attempt.push = resolve));
    attempts.set(version, attempt);
  }
  return attempts.get(version);
}

const ARRAYS = {
  float64: Float64Array,
  float32: Float32Array,
  uint8: Uint8Array,
  uint16: Uint16Array,
  int32: Int32Array,
};

// One message's changes with their columns as arrays.  Every array gets a buffer of
// its own: Bokeh writes whole buffers when a document is copied.
function decode(text, view) {
  const changes = JSON.parse(text);
  for (const { columns } of changes)
    for (const [name, column] of Object.entries(columns ?? {})) {
      if (Array.isArray(column)) continue;
      const type = ARRAYS[column.type];
      const from = view.byteOffset + column.offset;
      const bytes = view.buffer.slice(from, from + column.length * type.BYTES_PER_ELEMENT);
      columns[name] = new type(bytes);
    }
  return changes;
}

// The messages of a buffer: see framed() in encode.py.
export function frames(buffer) {
  const out = [];
  const view = new DataView(buffer);
  for (let at = 0; at < buffer.byteLength; ) {
    const text = view.getUint32(at, true);
    const size = view.getUint32(at + 4, true);
    const bytes = new Uint8Array(buffer, at + 8, text);
    const message = JSON.parse(new TextDecoder().decode(bytes));
    out.push({ message, block: new DataView(buffer, at + 8 + text, size) });
    at += 8 + text + size;
  }
  return out;
}

// The bytes of a message as a buffer of their own.
const toBuffer = ({ buffer, byteOffset, byteLength }) => buffer.slice(byteOffset, byteOffset + byteLength);

function joined(old, more, keep) {
  const skip = Math.max(0, old.length + more.length - keep);
  if (Array.isArray(more)) return [...old, ...more].slice(skip);
  const all = new more.constructor(old.length + more.length - skip);
  const rest = old.subarray(Math.min(skip, old.length));
  all.set(rest, 0);
  all.set(more.subarray(Math.max(0, skip - old.length)), rest.length);
  return all;
}

// What several changes, in their order, come to: each source and each attribute once.
function summed(document, lists) {
  const data = new Map();
  const set = new Map();
  for (const change of lists.flat()) {
    if (change.set !== undefined) set.set(`${change.set} ${change.attribute}`, change);
    else if (change.keep === undefined) data.set(change.name, { ...change.columns });
    else {
      const before = data.get(change.name) ?? document.get_model_by_name(change.name).data;
      const after = {};
      for (const [name, more] of Object.entries(change.columns))
        after[name] = joined(before[name], more, change.keep);
      data.set(change.name, after);
    }
  }
  return { data, set: [...set.values()] };
}

// Bring a document from one state to the next.
function apply(document, { data, set }) {
  for (const change of set) {
    const model = document.get_model_by_name(change.set);
    const value = change.value;
    if (change.attribute === "range") model.setv({ start: value[0], end: value[1] });
    else if (change.attribute === "labels") {
      model.ticker.ticks = value.map(([at]) => at);
      model.major_label_overrides = new Map(value);
    }
    else if (change.attribute === "content") model.content = value;
    else if (change.attribute === "height") model.height = value + model.tags[0];
    else model.setv({ text: value, visible: value !== "" });
  }
  for (const [name, columns] of data) document.get_model_by_name(name).data = { ...columns };
}

// Painting writes the style sheet of each renderer, mostly as it was, and then asks for a computed
// style: a browser worked all of them out anew for each of some hundred times a picture.
function unforced(Bokeh) {
  const sheet = Bokeh.require("core/dom").InlineStyleSheet.prototype;
  const update = sheet._update;
  if (!update || sheet.unforced_) return;
  sheet.unforced_ = true;
  sheet._update = function (css) {
    if (this.el.textContent !== css) update.call(this, css);
  };
}

// How long a page rests (milliseconds) after a drawing that took so long.
function rested(took) {
  if (took <= 0) return 0;
  return Math.max(LEAST * took, Math.min(REST * took, ALIVE - took));
}

// The stream of one model: what came, in order, each exactly once.
class Feed {
  constructor(model) {
    this.model = model;
    this.views = new Set();
    this.waiting = [];
    this.seq = -1;
    this.chosen = null;
    this.rest = 0;
    this.lit = "";
    this.ready = this.start();
  }

  act(name, value) {
    if (!this.lost) this.model.send({ type: "action", name, value: value ?? null });
  }

  // Whether nobody answers.
  get silent() {
    return !!this.lost;
  }

  get help() {
    return HELP;
  }

  // One gang, by its number, in all panels of all views of this model, or the wait at a moment in
  // a lane; null: none.
  choose(chosen) {
    this.chosen = chosen;
    for (const view of this.views) view.mark();
    this.act("choose", chosen);
  }

  // That gang's line in its cell: an event of the page, which JupyterLab's extension hears
  // (line.js).  A cell that is gone, or was never of this notebook, has no line to show.
  light(reveal = false) {
    const place = this.views.size && !this.frozen ? this.header?.place : null;
    const cell = place ? cellsOf(this.model).find(({ id }) => id === place.cell) : undefined;
    const line = cell ? { cell, number: place.number, text: place.text } : null;
    const told = line ? `${cell.id} ${line.number} ${line.text}` : "";
    if (told === this.lit && !reveal) return;
    this.lit = told;
    document.dispatchEvent(
      new CustomEvent("pathways-lab:line", { detail: { owner: this, line, reveal } }),
    );
  }

  async start() {
    const first = this.model.get("_snapshot");
    if (first?.frozen) return this.freeze(first);
    revive(this.model, first?.id);
    const { Bokeh, how } = await bokeh(this.model);
    this.Bokeh = Bokeh;
    this.how = how;
    if (this.newer) this.take(this.newer);
    else this.model.send({ type: "snapshot" });
  }

  load(json) {
    unforced(this.Bokeh);
    return this.Bokeh.require("document").Document.from_json(json);
  }

  receive(message, buffers) {
    if (this.lost) return;
    if (message.type === "scripts") attemptFor(this.model.get("_scripts").version).push(buffers);
    else if (message.type === "snapshot") this.take({ ...message, block: buffers[0] });
    else if (message.type === "kept") keep(this.model, (this.kept = message));
    else if (message.type === "file") this.saver?.foot.save(message.name, toBuffer(buffers[0]));
    else if (message.type === "text")
      for (const { foot } of this.views) foot.text.textContent = `${message.text}\n\n${this.help}`;
    else if (message.type === "update") {
      this.waiting.push({ ...message, block: buffers[0] });
      if (this.document) this.soon();
      else if (this.waiting.length > 600) this.waiting.shift();
    }
  }

  // Seconds since the picture is what it is.
  get age() {
    return (performance.now() - this.came) / 1000;
  }

  take(snapshot) {
    if (snapshot.frozen) return this.freeze(snapshot);
    if (!this.Bokeh) {
      this.newer = snapshot; // BokehJS is still on its way
      return;
    }
    if (this.document && snapshot.seq <= this.seq) return;
    this.seq = snapshot.seq;
    this.came = performance.now();
    this.header = snapshot.header;
    this.document = this.load(JSON.parse(snapshot.document));
    apply(this.document, summed(this.document, [decode(snapshot.changes, snapshot.block)]));
    this.catchUp();
    for (const view of this.views) view.paused || view.show();
    if (!this.told) this.model.send({ type: "ready", keeps: !!notebookOf(this.model) });
    this.told = true;
  }

  // Draw at most once per frame, and never most of the time: a page that is slow shows
  // fewer pictures, and still answers to a person.
  soon() {
    this.due ??= setTimeout(() => {
      const begun = performance.now();
      const draw = () => {
        this.due = undefined;
        this.catchUp();
        const shown = () =>
          setTimeout(() => (this.rest = rested(performance.now() - begun - FRAMES)));
        document.hidden ? shown() : requestAnimationFrame(shown);
      };
      document.hidden ? draw() : requestAnimationFrame(draw);
    }, this.rest);
  }

  // Apply what follows on the state; a gap means that a message was lost on the
  // way, and a snapshot, asked for or sent by itself, repairs it.
  catchUp() {
    if (!this.document) return; // it was frozen after the wish to draw
    const rest = [];
    const lists = [];
    let header = null;
    for (const update of this.waiting) {
      if (update.seq <= this.seq) continue;
      if (update.seq > this.seq + 1) {
        rest.push(update);
        continue;
      }
      this.seq = update.seq;
      lists.push(decode(update.changes, update.block));
      header = update.header ?? header;
    }
    if (header && !this.lost) {
      this.header = header;
      for (const view of this.views) view.header(header);
    }
    if (lists.length) {
      const changes = summed(this.document, lists);
      apply(this.document, changes);
      this.came = performance.now();
      for (const view of this.views) view.apply(changes);
    }
    this.waiting = rest;
    if (rest.length && !this.asked) {
      this.asked = true;
      this.model.send({ type: "snapshot" });
      setTimeout(() => (this.asked = false), 2000);
    }
  }

  // Its kernel is gone, perhaps restarted: this is the last that was known.
  lose() {
    if (this.lost || this.frozen || !this.header) return;
    this.lost = true;
    this.header = { ...this.header, state: "kernel gone", actions: [], compiling: null };
    for (const view of this.views) view.header(this.header);
  }

  freeze(snapshot) {
    this.frozen = snapshot.frozen;
    this.document = undefined;
    for (const view of [...this.views]) view.freeze(this.frozen);
    this.light();
    // The kernel replaces the output itself, unless this page was opened after
    // the cell had started: then the notebook still holds the widget.
    setTimeout(() => settle(this.model, { id: snapshot.id, ...snapshot.frozen }), 1500);
  }

  // A view has left the page, perhaps with a cell that was moved: that shows now what the
  // document has.
  left(view) {
    this.views.delete(view);
    if (this.kept && !this.frozen) setTimeout(() => revive(this.model, this.kept.id));
  }
}

// A picture that a notebook keeps: one snapshot and no kernel, so the page answers what it can.
// See saved.py.
class Saved extends Feed {
  get saved() {
    return true;
  }

  get silent() {
    return true;
  }

  get help() {
    return SAVED_HELP;
  }

  async start() {
    const scripts = this.model.get("_scripts");
    const got = await found(scripts).catch(() => found({ ...scripts, version: "" }));
    const [drew, shows] = [scripts.version, got.Bokeh.version].map((version) => version.split(".")[0]);
    if (drew !== shows) throw new Error(`BokehJS is ${got.Bokeh.version}, and ${scripts.version} drew it`);
    Object.assign(this, got);
    this.take(this.model.get("_snapshot"));
  }

  act(name, value) {
    for (const view of this.views)
      if (name === "seek") view.go(value ?? this.header.moments[1]);
      else if (name === "choose") {
        this.header = { ...this.header, chosen: view.about(value) };
        view.header(this.header);
      } else if (name === "text") this.receive({ type: "text", text: this.model.get("text") });
  }
}

// Bring to life in *el* what a notebook keeps: *data* of saved.py, its *text*, and BokehJS from a
// *route* of the server.  Returns what takes it away again.
export async function show(el, data, text, route) {
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const [{ message, block }] = frames(await new Response(plain).arrayBuffer());
  const { version } = JSON.parse(message.document);
  const known = {
    _scripts: { version, files: ["bokeh.min.js"], route },
    _snapshot: { ...message, block },
    text,
  };
  const feed = new Saved({ get: (name) => known[name], send() {} });
  await feed.ready;
  const view = new View(feed, el);
  feed.views.add(view);
  try {
    await view.show();
  } catch (error) {
    view.remove();
    throw error;
  }
  return () => view.remove();
}

export default () => {
  let feed;
  return {
    initialize({ model }) {
      feed = new Feed(model);
      const receive = (message, buffers) => feed.receive(message, buffers);
      const lose = () => feed.lose();
      model.on("msg:custom", receive);
      model.on("comm_live_update", lose);
      return () => {
        model.off("msg:custom", receive);
        model.off("comm_live_update", lose);
      };
    },
    async render({ model, el }) {
      try {
        await feed.ready;
      } catch (error) {
        el.textContent = `The live view needs BokehJS, and it could not be loaded: ${error.message}`;
        return;
      }
      const view = new View(feed, el);
      feed.views.add(view);
      await view.show();
      return () => view.remove();
    },
  };
};
