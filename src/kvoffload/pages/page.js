// Draws the charts of a report in the colours of the page, and again when these change.
const charts = JSON.parse(document.getElementById("charts").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");

// plotly.js stands in the page as compressed text.
async function expandPlotly() {
  const text = atob(document.getElementById("plotly").textContent);
  const bytes = Uint8Array.from(text, (letter) => letter.charCodeAt(0));
  const script = document.createElement("script");
  const expanded = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  script.textContent = await new Response(expanded).text();
  document.head.append(script);
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function inColours(layout) {
  const axis = { gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--line"), automargin: true };
  return {
    ...layout,
    xaxis: { ...axis, ...layout.xaxis },
    yaxis: { ...axis, ...layout.yaxis },
    paper_bgcolor: colour("--page"), plot_bgcolor: colour("--page"),
    font: { color: colour("--ink"), family: "system-ui, sans-serif", size: 12 },
    hoverlabel: { bgcolor: colour("--soft"), bordercolor: colour("--line"), font: { color: colour("--ink") }, align: "left" },
    legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom" },
    margin: { l: 48, r: 12, t: 12, b: 40 },
    hovermode: "closest",
  };
}

// On a phone the names of a legend stand below each other, and take the chart's room.
function height(chart) {
  const names = chart.data.filter((trace) => trace.showlegend !== false).length;
  return innerWidth < 600 ? `${20 + 1.3 * names}rem` : "";
}

function draw() {
  for (const chart of charts) document.getElementById(chart.id).style.height = height(chart);
  return Promise.all(charts.map(({ id, data, layout }) =>
    Plotly.react(id, data, inColours(layout), { responsive: true, displaylogo: false, displayModeBar: false })));
}

for (const button of document.querySelectorAll("button[data-chart]")) {
  button.addEventListener("click", () => Plotly.downloadImage(button.dataset.chart, {
    format: button.dataset.format, filename: button.dataset.chart, width: 960, height: 540, scale: 2,
  }));
}
async function start() {
  await expandPlotly();
  dark.addEventListener("change", draw);
  // Paper is narrower than a screen, and white.
  addEventListener("beforeprint", () => draw().then(() => charts.forEach(({ id }) => Plotly.Plots.resize(id))));
  addEventListener("afterprint", draw);
  await draw();
  document.documentElement.dataset.drawn = charts.length;
}

if (window.DecompressionStream) start();
else for (const { id } of charts) document.getElementById(id).textContent = "Charts need a browser of 2023 or later.";
