// What a notebook's document keeps of a live view: a picture that needs no kernel.
//
// JupyterLab shows an output as it came, and saves what the shared document says of it.  So the
// live view stays in the page while the document, changed silently, holds the static picture
// and, in its metadata, the number of the widget.  A page that opens the document while a
// kernel has that widget finds the place by the number, and puts the live view back.

const WIDGET = "application/vnd.jupyter.widget-view+json";

// The notebook that shows a widget; undefined in other places.
const notebookOf = (model) => model.widget_manager?.context?.model;

const cellsOf = (model) => [...(notebookOf(model)?.cells ?? [])];

// Where the view of a widget is, or was when the document was saved: [cell, index, output].
function* outputsOf(model, id) {
  for (const cell of cellsOf(model))
    for (let i = 0; i < (cell.outputs?.length ?? 0); i++) {
      const output = cell.outputs.get(i);
      const shown = output.data?.[WIDGET]?.model_id ?? output.metadata?.pathways_lab?.view;
      if (id && shown === id) yield [cell, i, output];
    }
}

const stored = ({ data, metadata }) => ({ output_type: "display_data", data, metadata });

// Save *bundle* in the live view's place, which goes on in this page.
function keep(model, { id, ...bundle }) {
  for (const [cell, i] of outputsOf(model, id)) {
    const known = cell.sharedModel.getOutputs()[i]?.data ?? {};
    if (!known[WIDGET] && known["text/html"] === bundle.data["text/html"]) continue;
    cell.sharedModel.updateOutputs(i, i + 1, [stored(bundle)], "silent-change");
    notebookOf(model).dirty = true;
  }
}

// Show the live view again where the document has its picture.
function revive(model, id) {
  for (const [cell, i, output] of outputsOf(model, id)) {
    if (output.data[WIDGET]) continue;
    const { data, metadata } = output;
    const view = { version_major: 2, version_minor: 0, model_id: id };
    cell.outputs.set(i, stored({ data: { ...data, [WIDGET]: view }, metadata }));
    keep(model, { id, data, metadata });
  }
}

// Show and save *bundle*: the view is over.
function settle(model, { id, ...bundle }) {
  for (const [cell, i] of outputsOf(model, id)) cell.outputs.set(i, stored(bundle));
}
