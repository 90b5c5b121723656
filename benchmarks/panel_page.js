// What benchmarks/panel.py looks at in the page; times are seconds, as Python's time.time().
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
    presses: [], // when the mouse went down
    seen: {}, // what was looked for, and when it came
    changes: [], // when a part of the output changed

    // Run a source in the first cell, and do not wait for it.
    begin: (source) => {
      const notebook = app.shell.currentWidget.content;
      notebook.activeCellIndex = 0;
      cell().model.sharedModel.setSource(source);
      bench.began = now();
      running = app.commands.execute("notebook:run-cell").then(() => now());
    },

    // When it had begun and was over (null: it is not, after so many seconds), and its errors.
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

    // Note when each text that matches first is in the output.
    lookFor: (pattern) => {
      const found = (bench.seen = {});
      const area = cell().outputArea.node;
      bench.lookAt(area, (at) => {
        for (const [text] of area.textContent.matchAll(new RegExp(pattern, "g"))) {
          found[text] ??= at;
        }
      });
    },

    // Note when a part of the output changes.
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

    // Find the longest time between two frames, until it is asked for.
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
