// A page of the dashboard: the notebook's live view, fed by this page's own server.
// live.js wants a widget's model; here is one whose messages come by plain GETs, because
// every proxy between here and the lab knows those.

import live, { frames } from "./live.js";

const panels = document.body.dataset.panels;
const notice = document.getElementById("notice");

// --- theme: JupyterLab's where this page is part of it, else what is asked for ---------

const THEMED = [
  "--jp-layout-color0", "--jp-layout-color1", "--jp-layout-color2", "--jp-border-color1",
  "--jp-border-color2", "--jp-ui-font-color1", "--jp-ui-font-color2", "--jp-brand-color1",
];

function jupyter() {
  try {
    const body = window.parent !== window && window.parent.document.body;
    return body && body.dataset.jpThemeName ? body : null;
  } catch {
    return null; // another origin
  }
}

function theme() {
  const root = document.documentElement;
  const body = jupyter();
  const asked = new URLSearchParams(location.search).get("theme");
  const dark = body
    ? body.dataset.jpThemeLight === "false"
    : asked
      ? asked === "dark"
      : window.matchMedia("(prefers-color-scheme: dark)").matches;
  if (body) {
    const style = window.parent.getComputedStyle(body);
    for (const name of THEMED) root.style.setProperty(name, style.getPropertyValue(name));
  }
  root.dataset.dark = String(dark);
  document.body.dataset.jpThemeLight = String(!dark); // live.js watches it, and repaints
  document.body.dataset.jpThemeName = body?.dataset.jpThemeName ?? "";
}

theme();
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", theme);
const host = jupyter();
if (host) new MutationObserver(theme).observe(host, { attributes: true });

// Links keep what was asked of this page.
for (const link of document.querySelectorAll("nav a")) link.search = location.search;

// --- the feed ----------------------------------------------------------------------------

class Model {
  constructor() {
    this.handlers = new Set();
    this.scripts = { version: document.body.dataset.bokeh, files: [], route: "" };
    this.since = 0; // number of the newest message that has come
    this.view = ""; // of a feed for this page alone, once somebody looks elsewhere
    this.wants = []; // what somebody wants of it
  }
  get(name) {
    return name === "_scripts" ? this.scripts : undefined;
  }
  on(event, handler) {
    if (event === "msg:custom") this.handlers.add(handler); // nothing else happens here
  }
  off(event, handler) {
    this.handlers.delete(handler);
  }
  send(message) {
    if (message.type === "snapshot") this.since = 0; // a message was lost, or none has come
    if (message.type !== "action") return;
    if (!["save", "text"].includes(message.name) && !this.view) {
      this.view = crypto.getRandomValues(new Uint32Array(2)).join("");
      this.since = 0;
    }
    this.wants.push(message);
    hurry();
  }
  receive({ message, block }) {
    this.since = message.seq ?? this.since;
    for (const handler of this.handlers) handler(message, [block]);
  }
}

async function ask(model) {
  const wanted = model.wants.shift();
  const query = new URLSearchParams({ panels, since: model.since, view: model.view });
  if (wanted) {
    query.set("do", wanted.name);
    if (wanted.value !== null) query.set("value", wanted.value);
  }
  const answer = await fetch(`pathways-lab/feed?${query}`, { cache: "no-store" });
  if (!answer.ok) throw new Error(answer.status);
  return frames(await answer.arrayBuffer());
}

const QUICK = 0.2; // seconds between two questions while things happen
const SLOW = 1; // ... when nothing does
const RARE = 20; // ... and when nobody answers

let hurry = () => {}; // ends the present pause

const pause = (seconds) =>
  new Promise((resolve) => {
    const timer = setTimeout(resolve, 1000 * seconds);
    hurry = () => {
      clearTimeout(timer);
      resolve();
    };
  });

// A frame is painted only where somebody can see it: hidden tabs do not ask.
const seen = () => new Promise(requestAnimationFrame);

function tell(text) {
  notice.hidden = !text;
  notice.textContent = text;
}

async function follow(model) {
  for (let wait = QUICK; ; await pause(model.wants.length ? 0 : wait)) {
    await seen();
    try {
      const found = await ask(model);
      for (const frame of found) model.receive(frame);
      wait = found.length ? QUICK : Math.min(SLOW, 1.5 * wait);
      tell("");
    } catch {
      tell("The lab does not answer: it has ended, or is busy.");
      wait = Math.min(RARE, 2 * Math.max(wait, SLOW));
    }
  }
}

const model = new Model();
const widget = live();
widget.initialize({ model });
tell("The first picture is being drawn.");
follow(model);
await new Promise((resolve) => model.on("msg:custom", resolve));
await widget.render({ model, el: document.querySelector("main") });
