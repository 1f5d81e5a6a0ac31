// The user's line of a chosen gang, lit up in the editor of its cell.  Views say by an event
// of the page which line that is (live.js); here every editor looks whether it has it.

// Line *number* of a cell as the kernel counts, which leaves out empty lines at its top;
// null where the text there is another by now.
function lineOf(doc, number, text) {
  let skipped = 0;
  while (skipped < doc.lines && !doc.line(skipped + 1).text.trim()) skipped += 1;
  if (number + skipped > doc.lines) return null;
  const line = doc.line(number + skipped);
  return line.text.trim() === text ? line : null;
}

export async function lines(shared) {
  const { EditorExtensionRegistry, IEditorExtensionRegistry } = await shared("@jupyterlab/codemirror");
  const { Decoration, EditorView, ViewPlugin } = await shared("@codemirror/view");
  const { StateEffect } = await shared("@codemirror/state");

  const lit = new Map(); // {cell, number, text} by the view that wants it
  const editors = new Set();
  const changed = StateEffect.define();
  const mark = Decoration.line({ class: "cm-pathways-line" });

  class Editor {
    constructor(view, model) {
      this.view = view;
      this.model = model;
      editors.add(this);
      this.find();
    }

    find() {
      const starts = new Set();
      for (const { cell, number, text } of lit.values())
        if (cell.sharedModel === this.model.sharedModel)
          starts.add(lineOf(this.view.state.doc, number, text)?.from);
      starts.delete(undefined);
      this.decorations = Decoration.set([...starts].map((from) => mark.range(from)), true);
    }

    update(update) {
      const told = update.transactions.some(({ effects }) => effects.some((e) => e.is(changed)));
      if (told || update.docChanged) this.find();
    }

    destroy() {
      editors.delete(this);
    }

    reveal({ cell, number, text }) {
      if (cell.sharedModel !== this.model.sharedModel) return;
      const line = lineOf(this.view.state.doc, number, text);
      if (line) this.view.dispatch({ effects: EditorView.scrollIntoView(line.from, { y: "center" }) });
    }
  }

  function hear({ detail: { owner, line, reveal } }) {
    if (line) lit.set(owner, line);
    else lit.delete(owner);
    for (const editor of editors) {
      editor.view.dispatch({ effects: changed.of(null) });
      if (reveal && line) editor.reveal(line);
    }
  }

  return {
    id: "pathways-lab:line",
    description: "Lights up the source line of the gang that is chosen in a live view.",
    autoStart: true,
    requires: [IEditorExtensionRegistry],
    activate: (app, registry) => {
      registry.addExtension(
        Object.freeze({
          name: "pathways-lab:line",
          factory: ({ model }) =>
            EditorExtensionRegistry.createImmutableExtension(
              ViewPlugin.define((view) => new Editor(view, model), {
                decorations: (editor) => editor.decorations,
              }),
            ),
        }),
      );
      document.addEventListener("pathways-lab:line", hear);
    },
  };
}
