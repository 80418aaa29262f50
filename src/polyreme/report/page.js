"use strict";
(() => {
  const root = document.documentElement;
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const titles = { steps: "step", seconds: root.dataset.seconds, wire: "bytes sent by one process" };
  const state = { x: "steps", scale: "linear" };

  const token = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();

  function draw(name) {
    const box = document.getElementById("plot-" + name);
    const figure = figures[name];
    const narrow = box.clientWidth < 480;
    const grid = { gridcolor: token("line"), linecolor: token("line"), tickcolor: token("line") };
    const data = figure.data.map((trace, i) => {
      const color = token(trace.meta);
      return {
        ...trace,
        x: figure.xs[state.x][i],
        line: { ...trace.line, color },
        marker: { ...trace.marker, color, line: { width: trace.type === "bar" ? 0 : 1, color } },
      };
    });
    const layout = {
      ...figure.layout,
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: token("dim") },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      hoverlabel: { bgcolor: token("panel"), bordercolor: token("line"), font: { color: token("ink") } },
      dragmode: narrow ? false : "zoom",
      xaxis: {
        ...figure.layout.xaxis,
        ...grid,
        title: { text: titles[state.x], standoff: 6 },
        exponentformat: "SI",
        ticksuffix: state.x === "wire" ? "B" : "",
      },
      yaxis: { ...figure.layout.yaxis, ...grid },
    };
    if (figure.log_switch) layout.yaxis.type = state.scale;
    if (narrow) layout.margin = { ...layout.margin, l: 36, r: 6 };
    Plotly.react(box, data, layout, { displayModeBar: false, responsive: true });
  }

  const drawAll = () => Object.keys(figures).forEach(draw);

  for (const button of document.querySelectorAll("button[data-set]")) {
    button.addEventListener("click", () => {
      state[button.dataset.set] = button.value;
      for (const other of document.querySelectorAll(`button[data-set="${button.dataset.set}"]`)) {
        other.setAttribute("aria-pressed", String(other.value === button.value));
      }
      drawAll();
    });
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  addEventListener("beforeprint", () => {
    root.dataset.print = "";
    for (const fold of document.querySelectorAll("details")) fold.open = true;
    drawAll();
  });
  addEventListener("afterprint", () => {
    delete root.dataset.print;
    drawAll();
  });
  drawAll();
  root.dataset.ready = "";
})();
