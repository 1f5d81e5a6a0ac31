// JupyterLab's side: the panel's place, commands, palette entries, pages in tabs.

import { follow } from "./follow.js";
import { Panel } from "./panel.js";

const PAGES = [
  "overview", "islands", "order", "hosts", "heat", "queues", "utilisation", "memory", "graph", "messages",
  "planned",
];
const CATEGORY = "Pathways Lab";
const ID = "pathways-lab:panel";
const OPENED = "pathways-lab:opened"; // where a tab of the browser keeps that the panel was opened

// Two islands of devices; the class lets JupyterLab's theme colour it.
const ICON = `<svg xmlns="http://www.w3.org/2000/svg" width="16" height="16" viewBox="0 0 24 24">
<g class="jp-icon3 jp-icon-selectable" fill="#616161">
<rect x="2" y="3" width="8" height="5" rx="1"/><rect x="2" y="9.5" width="8" height="5" rx="1"/>
<rect x="2" y="16" width="8" height="5" rx="1"/><rect x="14" y="3" width="8" height="5" rx="1"/>
<rect x="14" y="9.5" width="8" height="5" rx="1"/><rect x="14" y="16" width="8" height="5" rx="1"/>
</g></svg>`;

const titled = (page) => page[0].toUpperCase() + page.slice(1);
const pathOf = (page) => (page === "overview" ? "pathways" : `individual-pathways-${page}`);

export async function plugin(shared, styles) {
  const { Widget } = await shared("@lumino/widgets");
  const { ICommandPalette, MainAreaWidget } = await shared("@jupyterlab/apputils");
  const { ILayoutRestorer } = await shared("@jupyterlab/application");
  const { INotebookTracker, NotebookActions } = await shared("@jupyterlab/notebook");
  const { ISettingRegistry } = await shared("@jupyterlab/settingregistry");
  const { ServerConnection } = await shared("@jupyterlab/services");
  const { LabIcon } = await shared("@jupyterlab/ui-components");

  const icon = new LabIcon({ name: "pathways-lab:islands", svgstr: ICON });

  function activate(app, palette, restorer, notebooks, registry) {
    const settings = app.serviceManager.serverSettings;
    const root = `${settings.baseUrl}pathways-lab/labs`;

    async function ask(path) {
      const answer = await ServerConnection.makeRequest(root + path, { cache: "no-store" }, settings);
      if (!answer.ok) throw new Error(`${answer.status}`);
      const text = await answer.text();
      return text ? JSON.parse(text) : null;
    }

    const current = () => app.shell.currentWidget?.sessionContext?.session?.kernel?.id ?? null;

    function notebook(number) {
      for (const { kernel, path } of app.serviceManager.sessions.running())
        if (kernel?.id === number) return path.split("/").at(-1);
    }

    class Place extends Widget {
      constructor() {
        super();
        this.id = "pathways-lab-panel";
        this.title.icon = icon;
        this.title.caption = "Pathways Lab";
        this.addClass("pathways-panel");
        const open = () => app.commands.execute("pathways-lab:open");
        this.panel = new Panel(this.node, ask, open, { current, notebook });
      }
      // What nobody sees asks for nothing.
      onAfterShow() {
        this.panel.begin();
      }
      onAfterHide() {
        this.panel.end();
      }
      onCloseRequest(message) {
        this.panel.end();
        super.onCloseRequest(message);
      }
    }

    const link = document.head.appendChild(document.createElement("link"));
    link.rel = "stylesheet";
    link.href = styles;
    const place = new Place();
    app.shell.add(place, "left", { rank: 650 });
    restorer?.add(place, place.id);

    if (notebooks) follow(notebooks, NotebookActions);

    // The first lab that starts opens the panel: with "Run All" the page shows the last cell, and
    // nothing else would show that devices compute.  Kernels mark the line that says it is ready.
    const wishes = registry?.load(ID).catch(() => null);
    notebooks?.widgetAdded.connect((_, { sessionContext }) => {
      sessionContext.iopubMessage.connect(async (__, { content }) => {
        if (content.metadata?.pathways_lab?.lab !== "ready" || sessionStorage.getItem(OPENED)) return;
        sessionStorage.setItem(OPENED, "yes");
        if ((await wishes)?.composite.openAtStart !== false) app.shell.activateById(place.id);
      });
    });

    app.commands.addCommand("pathways-lab:show", {
      label: "Pathways Panel",
      icon,
      execute: () => app.shell.activateById(place.id),
    });
    app.commands.addCommand("pathways-lab:open", {
      label: ({ page }) => `Pathways ${titled(page ?? "overview")}`,
      icon: ({ isPalette }) => (isPalette ? undefined : icon),
      execute: async ({ page = "overview" }) => {
        const lab = await place.panel.find();
        if (!lab) {
          app.shell.activateById(place.id); // it says what to do
          return;
        }
        const id = `pathways-lab-${lab}-${page}`;
        const known = [...app.shell.widgets("main")].find((each) => each.id === id);
        if (!known) {
          const made = tab(id, titled(page), `${root}/${lab}/${pathOf(page)}`);
          made.title.caption = place.panel.title;
          app.shell.add(made, "main");
        }
        app.shell.activateById(id);
      },
    });
    palette?.addItem({ command: "pathways-lab:show", category: CATEGORY });
    for (const page of PAGES)
      palette?.addItem({ command: "pathways-lab:open", category: CATEGORY, args: { page } });
  }

  function tab(id, title, address) {
    const content = new Widget();
    content.addClass("pathways-page");
    const frame = content.node.appendChild(document.createElement("iframe"));
    frame.src = address;
    frame.title = `Pathways Lab: ${title}`;
    const widget = new MainAreaWidget({ content });
    widget.id = id;
    widget.title.label = title;
    widget.title.icon = icon;
    widget.title.closable = true;
    return widget;
  }

  return {
    id: ID,
    description: "The islands, programs and clients of a Pathways lab beside the notebook.",
    autoStart: true,
    optional: [ICommandPalette, ILayoutRestorer, INotebookTracker, ISettingRegistry],
    activate,
  };
}
