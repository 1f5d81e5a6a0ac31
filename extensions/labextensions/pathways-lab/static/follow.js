// While a notebook runs many cells by itself, the live view that has just begun is in sight.
// "Run All" shows the last cell: whoever pressed it would look at the page's end, and see a
// picture when nothing in it moves any more.  Who scrolls, clicks or types looks where they want.

const GRACE = 700; // milliseconds after a run began in which its own click or key may come
const WAIT = 250; // ... between two looks whether the view is drawn
const LOOKS = 40; // so often

let touched = -Infinity; // when a person last did something

class Runs {
  constructor() {
    this.left = new Map(); // of each notebook, the cells that are to run, and since when any
  }

  scheduled(notebook, cell) {
    const run = this.left.get(notebook) ?? { cells: new Set(), since: performance.now() };
    run.cells.add(cell);
    this.left.set(notebook, run);
  }

  executed(notebook, cell) {
    const run = this.left.get(notebook);
    run?.cells.delete(cell);
    if (!run?.cells.size) this.left.delete(notebook);
  }

  // Whether *notebook* goes on by itself, and nobody has looked elsewhere since it began.
  alone(notebook) {
    const run = this.left.get(notebook);
    return !!run && run.cells.size > 1 && touched < run.since + GRACE;
  }
}

async function show(notebook, number, runs) {
  const cell = notebook.widgets.find(({ outputArea }) => outputArea?.future?.msg.header.msg_id === number);
  if (!cell) return;
  await notebook.scrollToItem(notebook.widgets.indexOf(cell), "start");
  for (let look = 0; look < LOOKS && runs.alone(notebook); look++) {
    const view = [...cell.outputArea.node.querySelectorAll(".pathways-lab")].at(-1);
    if (view?.offsetHeight > 100) return view.scrollIntoView({ block: "start" });
    await new Promise((resolve) => setTimeout(resolve, WAIT));
  }
}

// actions: JupyterLab's signals of cells that run.
export function follow(notebooks, actions) {
  const runs = new Runs();
  for (const name of ["wheel", "keydown", "pointerdown"])
    document.addEventListener(name, () => (touched = performance.now()), { capture: true, passive: true });
  actions.executionScheduled.connect((_, { notebook, cell }) => runs.scheduled(notebook, cell));
  actions.executed.connect((_, { notebook, cell }) => runs.executed(notebook, cell));
  notebooks.widgetAdded.connect((_, { content: notebook, sessionContext }) => {
    sessionContext.iopubMessage.connect((__, { content, parent_header }) => {
      const live = content.metadata?.pathways_lab?.live;
      if (live && notebook.isVisible && runs.alone(notebook)) show(notebook, parent_header.msg_id, runs);
    });
  });
}
