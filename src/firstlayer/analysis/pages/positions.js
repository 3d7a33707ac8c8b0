// Similarity of position rows: a picture of all pairs and a line of norms. No libraries.
"use strict";

const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const count = data.positions.length;
const bytes = Uint8Array.from(atob(data.cosines), (c) => c.charCodeAt(0));
const cosines = new Int16Array(bytes.buffer); // in units of 1/32767
const cosine = (i, j) => cosines[i * count + j] / 32767;

$("summary").textContent = `${data.name}: ${data.rows.toLocaleString("en")} positions`
  + (count < data.rows ? `, of which ${count} evenly spaced ones are compared.` : ".")
  + " Bright near the diagonal: neighboring positions have similar rows.";

// From blue over the background to orange, so that 0 has the color of the page.
const isDark = () => document.documentElement.dataset.theme
  ? document.documentElement.dataset.theme === "dark"
  : matchMedia("(prefers-color-scheme: dark)").matches;
function color(value) {
  const zero = isDark() ? [22, 24, 27] : [251, 251, 250];
  const end = value < 0 ? [41, 98, 186] : isDark() ? [255, 166, 77] : [204, 85, 0];
  return zero.map((v, c) => Math.round(v + (end[c] - v) * Math.min(1, Math.abs(value))));
}

let marked = null;
function drawCosines() {
  const canvas = $("cosines"), context = canvas.getContext("2d");
  canvas.width = canvas.height = count;
  const image = new ImageData(count, count);
  for (let i = 0; i < count; i++)
    for (let j = 0; j < count; j++)
      image.data.set([...color(cosine(i, j)), 255], 4 * (i * count + j));
  context.putImageData(image, 0, 0);
  $("ramp").style.background =
    `linear-gradient(to right, ${[-1, -0.5, 0, 0.5, 1].map((v) => `rgb(${color(v)})`)})`;
  $("low").textContent = "−1";
  $("high").textContent = "1";
}
function drawNorms() {
  const canvas = $("norms"), context = canvas.getContext("2d");
  const box = canvas.parentElement.getBoundingClientRect(), ratio = devicePixelRatio || 1;
  [canvas.width, canvas.height] = [box.width * ratio, box.height * ratio];
  const style = getComputedStyle(document.body), most = Math.max(...data.norms) || 1;
  context.font = `${12 * ratio}px system-ui, sans-serif`;
  context.fillStyle = style.color;
  context.globalAlpha = 0.65;
  context.fillText(most.toPrecision(3), 0, 12 * ratio);
  context.fillText("0", 0, canvas.height - 4 * ratio);
  context.globalAlpha = 1;
  context.strokeStyle = isDark() ? "#7db8f5" : "#0b5cad";
  context.lineWidth = 1.5 * ratio;
  context.beginPath();
  const left = 40 * ratio;
  data.norms.forEach((norm, i) => {
    const x = left + (i / Math.max(1, count - 1)) * (canvas.width - left - 4 * ratio);
    const y = canvas.height - 6 * ratio - (norm / most) * (canvas.height - 18 * ratio);
    i ? context.lineTo(x, y) : context.moveTo(x, y);
  });
  context.stroke();
}
function draw() {
  drawCosines();
  drawNorms();
}

const at = (share) => Math.min(count - 1, Math.max(0, Math.floor(share * count)));
function show(i, j) {
  marked = [i, j];
  $("value").textContent =
    `positions ${data.positions[i]} and ${data.positions[j]}: ${cosine(i, j).toFixed(3)}`;
}
$("cosines").addEventListener("pointermove", (event) => {
  const box = $("cosines").getBoundingClientRect();
  show(at(event.offsetY / box.height), at(event.offsetX / box.width));
});
$("cosines").addEventListener("keydown", (event) => {
  const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  if (!(event.key in steps)) return;
  event.preventDefault();
  const [i, j] = marked ?? [0, 0], [di, dj] = steps[event.key];
  show(Math.min(count - 1, Math.max(0, i + di)), Math.min(count - 1, Math.max(0, j + dj)));
});
$("norms").addEventListener("pointermove", (event) => {
  const width = $("norms").getBoundingClientRect().width;
  const i = at((event.offsetX - 40) / (width - 44));
  $("norm").textContent = `position ${data.positions[i]}: ${data.norms[i].toPrecision(4)}`;
});
$("theme").onclick = () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  draw();
};
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
addEventListener("resize", drawNorms);
draw();
