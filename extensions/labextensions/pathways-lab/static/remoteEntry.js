// What JupyterLab loads of a prebuilt extension: a container of module federation, which
// build tools usually generate.  By hand it is this short: `init` is given the modules that
// JupyterLab shares, `get` gives ours.  No build, no Node.  The rest is in panel.js.
(() => {
  const here = document.currentScript.src;
  let scope;

  // Any module that JupyterLab shares, as it has it.
  const shared = async (name) => {
    const versions = scope[name];
    if (!versions) throw new Error(`this JupyterLab does not share ${name}`);
    const found = Object.values(versions);
    return (await (found.find((entry) => entry.loaded) ?? found.at(-1)).get())();
  };

  (window._JUPYTERLAB ??= {})["pathways-lab"] = {
    init: (given) => {
      scope = given;
    },
    get: async (name) => {
      if (name !== "./extension") throw new Error(`there is no module ${name} here`);
      const { plugin } = await import(new URL("plugin.js", here));
      const { lines } = await import(new URL("line.js", here));
      const { pictures } = await import(new URL("saved.js", here));
      const styles = new URL("panel.css", here);
      const made = [await plugin(shared, styles), await lines(shared), await pictures(shared)];
      return () => ({ __esModule: true, default: made });
    },
  };
})();
