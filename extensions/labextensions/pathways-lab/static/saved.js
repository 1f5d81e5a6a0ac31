// Pictures that a notebook keeps, alive without a kernel: their data go to the script of live views,
// which Jupyter's server has.  Where that fails the static picture of the same output is shown.

const MIME = "application/vnd.pathways-lab.picture.v1"; // as saved.py has it
const RANK = 40; // behind widgets, before HTML
const ROUTE = "pathways-lab";

export async function pictures(shared) {
  const { Widget } = await shared("@lumino/widgets");
  const { IRenderMimeRegistry } = await shared("@jupyterlab/rendermime");

  class Picture extends Widget {
    constructor(script) {
      super();
      this.script = script;
      this.addClass("pathways-saved");
    }

    async renderModel({ data }) {
      this.clear();
      this.node.innerHTML = data["text/html"] ?? "";
      // One after the other as they come into sight: each takes a part of a second.
      this.sight = new IntersectionObserver((entries) => {
        if (!entries.some(({ isIntersecting }) => isIntersecting)) return;
        this.sight.disconnect();
        this.live(data);
      });
      this.sight.observe(this.node);
    }

    async live(data) {
      const place = document.createElement("div");
      place.className = "pathways-saved-coming";
      this.node.append(place);
      try {
        const { show } = await this.script();
        const end = await show(place, data[MIME], data["text/plain"] ?? "", `${ROUTE}/bokehjs`);
        if (!this.node.contains(place)) return end(); // there is another picture by now
        this.end = end;
        place.className = "";
        this.node.replaceChildren(place);
      } catch (error) {
        place.remove();
        console.info(`Pathways Lab shows a static picture: ${error.message}`);
      }
    }

    // Take away what was shown.
    clear() {
      this.sight?.disconnect();
      this.end?.();
      this.end = undefined;
      this.node.replaceChildren();
    }

    dispose() {
      this.clear();
      super.dispose();
    }
  }

  return {
    id: "pathways-lab:saved",
    description: "Shows the pictures that notebooks keep as live views show them, without a kernel.",
    autoStart: true,
    requires: [IRenderMimeRegistry],
    activate: (app, registry) => {
      const base = `${app.serviceManager.serverSettings.baseUrl}${ROUTE}/view/`;
      let script;
      const load = () =>
        (script ??= import(`${base}live.js`).then((loaded) => {
          const link = document.head.appendChild(document.createElement("link"));
          link.rel = "stylesheet";
          link.href = `${base}live.css`;
          return new Promise((resolve) => (link.onload = link.onerror = () => resolve(loaded)));
        }));
      const factory = { safe: false, mimeTypes: [MIME], createRenderer: () => new Picture(load) };
      registry.addFactory(factory, RANK);
    },
  };
}
