// Measurements of benchmarks/panel.py in the page; times are seconds, as Python's time.time().
() => {
  const app = window.jupyterapp;
  const now = () => (performance.timeOrigin + performance.now()) / 1000;
  const cell = () => app.shell.currentWidget.content.widgets[0];
  const everything = { childList: true, characterData: true, subtree: true };
  let running = null;
  let observer = null;
  let isCounting = false;

  const bench = {
    now,
    presses: [], // times of mouse presses
    seen: {}, // texts that matched, and their times
    changes: [], // times of changes in a part of the output

    // Run a source in the first cell without waiting for it.
    begin: (source) => {
      const notebook = app.shell.currentWidget.content;
      notebook.activeCellIndex = 0;
      cell().model.sharedModel.setSource(source);
      bench.began = now();
      running = app.commands.execute("notebook:run-cell").then(() => now());
    },

    // Return its start, its end (null: not within so many seconds), and its errors.
    finish: async (limit) => {
      const late = new Promise((end) => setTimeout(() => end(null), limit * 1000));
      const ended = await Promise.race([running, late]);
      const errors = cell()
        .model.outputs.toJSON()
        .filter((output) => output.output_type === "error")
        .map((output) => `${output.ename}: ${output.evalue}`);
      return { began: bench.began, ended, errors };
    },

    text: () => cell().outputArea.node.textContent,

    // Record when each matching text first appears in the output.
    lookFor: (pattern) => {
      const found = (bench.seen = {});
      const area = cell().outputArea.node;
      bench.lookAt(area, (at) => {
        for (const [text] of area.textContent.matchAll(new RegExp(pattern, "g"))) {
          found[text] ??= at;
        }
      });
    },

    // Record when a part of the output changes.
    noteChanges: (selector) => {
      bench.changes = [];
      const part = cell().outputArea.node.querySelector(selector);
      bench.lookAt(part, (at) => bench.changes.push(at));
    },

    lookAt: (node, look) => {
      bench.lookAway();
      observer = new MutationObserver(() => look(now()));
      observer.observe(node, everything);
    },

    lookAway: () => observer?.disconnect(),

    // Measure the longest time between two frames, until it is read.
    watchFrames: () => {
      let last = now();
      bench.longest = 0;
      isCounting = true;
      const frame = () => {
        const at = now();
        bench.longest = Math.max(bench.longest, at - last);
        last = at;
        if (isCounting) requestAnimationFrame(frame);
      };
      requestAnimationFrame(frame);
    },

    longestFrame: () =>
      new Promise((done) =>
        requestAnimationFrame(() => {
          isCounting = false;
          requestAnimationFrame(() => done(bench.longest));
        })
      ),
  };

  document.addEventListener(
    "mousedown",
    (event) => bench.presses.push((performance.timeOrigin + event.timeStamp) / 1000),
    { capture: true }
  );
  window.nbddpBench = bench;
};
