// The map of a table: points, search, neighbors, sums of words. No libraries.
"use strict";

const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const words = data.words, count = words.length, width = data.width;

// ---- Data ----

function bytesOf(text) {
  return Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
}

const vectors = new Int8Array(bytesOf(data.vectors).buffer); // rows of unit length, rounded
const norms = new Float32Array(bytesOf(data.norms).buffer);
const clusters = bytesOf(data.clusters);
// Both layouts as points of the unit square, x and y alternating.
const layouts = {};
for (const name of ["neighbors", "pca"]) {
  const whole = new Uint16Array(bytesOf(data[name]).buffer);
  layouts[name] = Float32Array.from(whole, (v) => v / 65535);
}
const lengths = new Float32Array(count); // of the rounded rows
for (let i = 0; i < count; i++) {
  let sum = 0;
  for (let d = i * width; d < (i + 1) * width; d++) sum += vectors[d] * vectors[d];
  lengths[i] = Math.sqrt(sum) || 1;
}
const rowOf = new Map(), rowOfLower = new Map();
for (let i = count - 1; i >= 0; i--) {
  rowOf.set(words[i], i);
  rowOfLower.set(words[i].toLowerCase(), i);
}
const find = (word) => rowOf.get(word) ?? rowOfLower.get(word.toLowerCase());

// Return the rows with the largest cosine to the sum of signed rows, themselves left out.
function nearest(terms, wanted) {
  const query = new Float32Array(width);
  for (const [sign, row] of terms)
    for (let d = 0; d < width; d++)
      query[d] += (sign * vectors[row * width + d]) / lengths[row];
  let length = 0;
  for (let d = 0; d < width; d++) length += query[d] * query[d];
  length = Math.sqrt(length) || 1;
  const used = new Set(terms.map(([, row]) => row));
  const found = []; // largest last
  for (let i = 0, at = 0; i < count; i++) {
    let dot = 0;
    for (let d = 0; d < width; d++, at++) dot += query[d] * vectors[at];
    const cosine = dot / (length * lengths[i]);
    if (found.length === wanted && cosine <= found[0].cosine) continue;
    if (used.has(i)) continue;
    let place = found.length;
    found.push({ row: i, cosine });
    while (place > 0 && found[place - 1].cosine > cosine) {
      found[place] = found[--place];
    }
    found[place] = { row: i, cosine };
    if (found.length > wanted) found.shift();
  }
  return found.reverse();
}

// Return signed rows of "king - man + woman", or a string that says what is wrong.
function parseSum(text) {
  const parts = text.trim().split(/\s+([+\-−])\s+/);
  const terms = [];
  for (let i = 0; i < parts.length; i += 2) {
    const row = find(parts[i]);
    if (row === undefined) return `“${parts[i]}” is not on this map`;
    terms.push([i && parts[i - 1] !== "+" ? -1 : 1, row]);
  }
  return terms;
}

// ---- State ----

const canvas = $("map"), context = canvas.getContext("2d");
const view = { x: 0.5, y: 0.5, scale: 1 }; // center in the unit square, pixels per unit
let layoutName = "neighbors";
let points = Float32Array.from(layouts.neighbors);
let selected = null; // {row, terms, title, near}
let hovered = -1;
let pixelRatio = 1, stageWidth = 1, stageHeight = 1;

// A grid of buckets over the unit square, to find the point under the pointer.
const GRID = 128;
let bucketStarts, bucketRows;
const cellOf = (v) => Math.min(GRID - 1, Math.max(0, Math.floor(v * GRID)));
function indexPoints() {
  bucketStarts = new Uint32Array(GRID * GRID + 1);
  const cells = new Uint32Array(count);
  for (let i = 0; i < count; i++) {
    cells[i] = cellOf(points[2 * i + 1]) * GRID + cellOf(points[2 * i]);
    bucketStarts[cells[i] + 1]++;
  }
  for (let c = 0; c < GRID * GRID; c++) bucketStarts[c + 1] += bucketStarts[c];
  const next = bucketStarts.slice();
  bucketRows = new Uint32Array(count);
  for (let i = 0; i < count; i++) bucketRows[next[cells[i]]++] = i;
}

const screenX = (i) => (points[2 * i] - view.x) * view.scale + stageWidth / 2;
const screenY = (i) => (points[2 * i + 1] - view.y) * view.scale + stageHeight / 2;

// Return the row of the point nearest to a place on the screen, or -1.
function pointAt(x, y, reach = 14) {
  const px = (x - stageWidth / 2) / view.scale + view.x;
  const py = (y - stageHeight / 2) / view.scale + view.y, r = reach / view.scale;
  let best = -1, least = r * r;
  for (let cy = cellOf(py - r); cy <= cellOf(py + r); cy++)
    for (let cx = cellOf(px - r); cx <= cellOf(px + r); cx++) {
      const cell = cy * GRID + cx;
      for (let k = bucketStarts[cell]; k < bucketStarts[cell + 1]; k++) {
        const i = bucketRows[k];
        const dx = points[2 * i] - px, dy = points[2 * i + 1] - py;
        if (dx * dx + dy * dy < least) [best, least] = [i, dx * dx + dy * dy];
      }
    }
  return best;
}

// ---- Colors and sizes ----

const isDark = () => getComputedStyle(document.documentElement).colorScheme === "dark" ||
  (!document.documentElement.dataset.theme &&
    matchMedia("(prefers-color-scheme: dark)").matches);
const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
function rgbOf(css) {
  probe.fillStyle = css;
  probe.fillRect(0, 0, 1, 1);
  return [...probe.getImageData(0, 0, 1, 1).data.slice(0, 3)];
}
const variable = (name) => {
  probe.canvas.style.color = `var(--${name})`;
  document.body.append(probe.canvas);
  const value = getComputedStyle(probe.canvas).color;
  probe.canvas.remove();
  return value;
};
const RAMP = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [236, 206, 52]];
const DARK_RAMP = [[106, 72, 160], [72, 116, 190], [47, 166, 160], [110, 214, 114],
  [253, 231, 37]];
function ramp(share, stops) {
  const at = Math.min(0.9999, Math.max(0, share)) * (stops.length - 1), i = Math.floor(at);
  return stops[i].map((v, c) => Math.round(v + (stops[i + 1][c] - v) * (at - i)));
}
// Share of rows before each row, by its place in the table on a logarithmic scale.
const rankShare = Float32Array.from(words, (_, i) =>
  1 - Math.log2(1 + data.places[i]) / Math.log2(1 + data.rows));
const sortedNorms = Float32Array.from(norms).sort();
const lowNorm = sortedNorms[Math.floor(count * 0.01)];
const highNorm = sortedNorms[Math.min(count - 1, Math.floor(count * 0.99))];
const normShare = norms.map((v) => (v - lowNorm) / (highNorm - lowNorm || 1));

let palette = []; // colors of the points, at most 256
let colorOf = new Uint8Array(count);
let colors = {};
function clusterColor(i, dark) {
  const hue = (i * 137.508 + 20) % 360, tone = i % 3;
  return rgbOf(`hsl(${hue} ${dark ? 62 : 60}% ${(dark ? 62 : 40) + tone * (dark ? 6 : 5)}%)`);
}
function recolor() {
  const dark = isDark(), by = $("color").value;
  colors = { back: rgbOf(variable("back")), text: variable("text"),
    quiet: variable("quiet"), accent: variable("accent"), halo: variable("back") };
  if (by === "cluster") {
    palette = data.labels.map((_, i) => clusterColor(i, dark));
    colorOf = clusters;
  } else {
    const stops = dark ? DARK_RAMP : RAMP, share = by === "rank" ? rankShare : normShare;
    palette = Array.from({ length: 64 }, (_, i) => ramp(i / 63, stops));
    colorOf = Uint8Array.from(share, (v) => Math.round(63 * Math.min(1, Math.max(0, v))));
  }
  drawLegend(by, dark);
  showPanel();
  redraw();
}
// The legend of clusters is in the panel.
function drawLegend(by, dark) {
  const legend = $("legend");
  legend.replaceChildren();
  legend.hidden = by === "cluster";
  if (by === "cluster") return;
  const bar = document.createElement("div"), ends = document.createElement("div");
  const stops = dark ? DARK_RAMP : RAMP;
  bar.className = "ramp";
  bar.style.background = `linear-gradient(to right, ${stops.map((c) => `rgb(${c})`)})`;
  ends.className = "ends";
  const [low, high] = by === "rank"
    ? ["end of the table", "beginning"]
    : [lowNorm.toPrecision(3), highNorm.toPrecision(3)];
  for (const text of [low, high]) {
    const span = document.createElement("span");
    span.textContent = text;
    ends.append(span);
  }
  const name = document.createElement("div");
  name.textContent = by === "rank"
    ? "Place in the table; most tables begin with frequent words" : "Norm of the row";
  legend.append(name, bar, ends);
}

// ---- Drawing ----

// Coverage of the pixels of a disc, by the number of quarter pixels in its radius.
const stamps = new Map();
function stampOf(radius) {
  const key = Math.max(2, Math.round(radius * 4));
  if (!stamps.has(key)) {
    const r = key / 4, half = Math.ceil(r), side = 2 * half + 1;
    const cover = new Float32Array(side * side);
    for (let y = 0; y < side; y++)
      for (let x = 0; x < side; x++)
        cover[y * side + x] =
          Math.min(1, Math.max(0, r + 0.5 - Math.hypot(x - half, y - half)));
    stamps.set(key, { half, side, cover });
  }
  return stamps.get(key);
}

let image = null;
function drawPoints() {
  const w = canvas.width, h = canvas.height;
  if (!image || image.width !== w || image.height !== h) image = new ImageData(w, h);
  const pixels = image.data;
  new Uint32Array(pixels.buffer).fill(
    (255 << 24) | (colors.back[2] << 16) | (colors.back[1] << 8) | colors.back[0]);
  const zoomed = Math.sqrt(view.scale / fitScale());
  const base = pixelRatio * Math.min(6, Math.max(1, (count > 20000 ? 1.1 : 1.6) * zoomed));
  const by = $("size").value, share = by === "rank" ? rankShare : normShare;
  const opacity = selected ? 0.35 : 0.8;
  for (let i = 0; i < count; i++) {
    const x = Math.round(screenX(i) * pixelRatio), y = Math.round(screenY(i) * pixelRatio);
    if (x < -20 || y < -20 || x > w + 20 || y > h + 20) continue;
    const factor = by === "equal" ? 1 : 0.6 + 1.8 * Math.min(1, Math.max(0, share[i])) ** 2;
    const { half, side, cover } = stampOf(base * factor);
    const [r, g, b] = palette[colorOf[i]];
    for (let sy = 0; sy < side; sy++) {
      const py = y + sy - half;
      if (py < 0 || py >= h) continue;
      for (let sx = 0; sx < side; sx++) {
        const px = x + sx - half;
        if (px < 0 || px >= w) continue;
        const alpha = cover[sy * side + sx] * opacity;
        if (!alpha) continue;
        const at = 4 * (py * w + px);
        pixels[at] += (r - pixels[at]) * alpha;
        pixels[at + 1] += (g - pixels[at + 1]) * alpha;
        pixels[at + 2] += (b - pixels[at + 2]) * alpha;
      }
    }
  }
  context.putImageData(image, 0, 0);
}

// Draw how many points there are in each place, blurred, as colors of the ramp.
function drawDensity() {
  const step = 4, w = Math.ceil(stageWidth / step), h = Math.ceil(stageHeight / step);
  let grid = new Float32Array(w * h);
  for (let i = 0; i < count; i++) {
    const x = Math.floor(screenX(i) / step), y = Math.floor(screenY(i) / step);
    if (x >= 0 && y >= 0 && x < w && y < h) grid[y * w + x]++;
  }
  for (let pass = 0; pass < 3; pass++) grid = blurred(blurred(grid, w, h, 1, w), w, h, w, 1);
  let most = 0;
  for (const v of grid) most = Math.max(most, v);
  const small = new ImageData(w, h), stops = isDark() ? DARK_RAMP : RAMP;
  for (let i = 0; i < grid.length; i++) {
    const share = Math.sqrt(grid[i] / (most || 1)), [r, g, b] = ramp(share, stops);
    const alpha = Math.min(1, share * 4);
    small.data.set([r, g, b].map((v, c) => colors.back[c] + (v - colors.back[c]) * alpha), 4 * i);
    small.data[4 * i + 3] = 255;
  }
  const sheet = document.createElement("canvas");
  [sheet.width, sheet.height] = [w, h];
  sheet.getContext("2d").putImageData(small, 0, 0);
  context.imageSmoothingEnabled = true;
  context.drawImage(sheet, 0, 0, w * step * pixelRatio, h * step * pixelRatio);
}
// Return the mean of 5 neighboring cells along the axis of stride `along`.
function blurred(grid, w, h, along, across) {
  const out = new Float32Array(grid.length), n = along === 1 ? w : h, lines = along === 1 ? h : w;
  for (let line = 0; line < lines; line++)
    for (let i = 0; i < n; i++) {
      let sum = 0;
      for (let k = Math.max(0, i - 2); k <= Math.min(n - 1, i + 2); k++)
        sum += grid[line * across + k * along];
      out[line * across + i * along] = sum / 5;
    }
  return out;
}

// Labels that were drawn, as boxes; a label that overlaps one of them is left out.
let boxes = [];
function label(text, x, y, { size = 12, weight = 400, color = colors.text, force = false } = {}) {
  context.font = `${weight} ${size * pixelRatio}px system-ui, "DejaVu Sans", sans-serif`;
  const half = context.measureText(text).width / 2 / pixelRatio + 3, tall = size * 0.75;
  const box = [x - half, y - tall, x + half, y + tall];
  const overlaps = boxes.some((b) =>
    b[0] < box[2] && box[0] < b[2] && b[1] < box[3] && box[1] < b[3]);
  if (overlaps && !force) return false;
  boxes.push(box);
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.lineJoin = "round";
  context.lineWidth = 3.5 * pixelRatio;
  context.strokeStyle = colors.halo;
  context.strokeText(text, x * pixelRatio, y * pixelRatio);
  context.fillStyle = color;
  context.fillText(text, x * pixelRatio, y * pixelRatio);
  return true;
}
const isInside = (x, y) => x > -40 && y > -10 && x < stageWidth + 40 && y < stageHeight + 10;

function drawSelection() {
  if (!selected) return;
  context.lineWidth = 1.2 * pixelRatio;
  context.strokeStyle = colors.accent;
  context.globalAlpha = 0.6;
  const from = selected.row;
  for (const { row } of selected.near) {
    if (from === null) break;
    context.beginPath();
    context.moveTo(screenX(from) * pixelRatio, screenY(from) * pixelRatio);
    context.lineTo(screenX(row) * pixelRatio, screenY(row) * pixelRatio);
    context.stroke();
  }
  context.globalAlpha = 1;
  const own = selected.terms.map(([, row]) => row);
  for (const row of [...selected.near.map((n) => n.row), ...own]) {
    const isOwn = own.includes(row);
    context.beginPath();
    context.arc(screenX(row) * pixelRatio, screenY(row) * pixelRatio,
      (isOwn ? 6 : 4) * pixelRatio, 0, 7);
    context.fillStyle = isOwn ? colors.accent : `rgb(${palette[colorOf[row]]})`;
    context.fill();
    context.strokeStyle = colors.halo;
    context.lineWidth = 1.5 * pixelRatio;
    context.stroke();
  }
  for (const row of own)
    label(words[row], screenX(row), screenY(row) - 14,
      { size: 14, weight: 700, color: colors.accent, force: true });
  for (const { row } of selected.near) {
    const x = screenX(row), y = screenY(row), side = words[row].length * 3.5 + 12;
    label(words[row], x, y - 12) || label(words[row], x, y + 13)
      || label(words[row], x + side, y) || label(words[row], x - side, y);
  }
}
function drawLabels() {
  if (!$("labels").checked) return;
  const zoom = view.scale / fitScale();
  if (zoom < 2.5 && !selected)
    data.labels.forEach((label_, i) => {
      const [x, y] = clusterCenter(i);
      const sx = (x - view.x) * view.scale + stageWidth / 2;
      const sy = (y - view.y) * view.scale + stageHeight / 2;
      if (isInside(sx, sy)) label(label_[0], sx, sy, { size: 13, weight: 700 });
    });
  // Words in the order of the table, as many as fit; the number limits the work.
  const limit = zoom < 1.5 && !selected ? 25 : 90;
  for (let i = 0, drawn = 0, tried = 0; i < count && drawn < limit && tried < 4000; i++) {
    const x = screenX(i), y = screenY(i);
    if (!isInside(x, y)) continue;
    tried++;
    if (words[i].length > 1 && label(words[i], x, y - 9, { size: 11, color: colors.quiet }))
      drawn++;
  }
}
const centers = {};
function clusterCenter(which) {
  centers[layoutName] ??= data.labels.map((_, c) => {
    const xs = [], ys = [];
    for (let i = 0; i < count; i++)
      if (clusters[i] === c) {
        xs.push(layouts[layoutName][2 * i]);
        ys.push(layouts[layoutName][2 * i + 1]);
      }
    const middle = (v) => v.sort((a, b) => a - b)[v.length >> 1] ?? 0.5;
    return [middle(xs), middle(ys)];
  });
  return centers[layoutName][which];
}

let isQueued = false;
function redraw() {
  if (isQueued) return;
  isQueued = true;
  requestAnimationFrame(() => {
    isQueued = false;
    boxes = [];
    if ($("density").checked) drawDensity();
    else drawPoints();
    drawSelection();
    drawLabels();
    if (hovered >= 0) {
      context.beginPath();
      context.arc(screenX(hovered) * pixelRatio, screenY(hovered) * pixelRatio,
        5 * pixelRatio, 0, 7);
      context.strokeStyle = colors.accent;
      context.lineWidth = 2 * pixelRatio;
      context.stroke();
    }
  });
}

// ---- Moving ----

const fitScale = () => Math.min(stageWidth, stageHeight) * 0.92;
function resize() {
  const box = canvas.parentElement.getBoundingClientRect();
  const before = fitScale();
  pixelRatio = Math.min(2, devicePixelRatio || 1);
  [stageWidth, stageHeight] = [Math.max(1, box.width), Math.max(1, box.height)];
  canvas.width = Math.round(stageWidth * pixelRatio);
  canvas.height = Math.round(stageHeight * pixelRatio);
  view.scale *= fitScale() / before;
  redraw();
}
function zoomAt(factor, x = stageWidth / 2, y = stageHeight / 2) {
  const before = view.scale;
  view.scale = Math.min(fitScale() * 400, Math.max(fitScale() * 0.5, before * factor));
  view.x += (x - stageWidth / 2) * (1 / before - 1 / view.scale);
  view.y += (y - stageHeight / 2) * (1 / before - 1 / view.scale);
  redraw();
}
const isStill = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
function animate(duration, step) {
  if (isStill()) return step(1);
  const start = performance.now();
  const frame = (now) => {
    const share = Math.min(1, (now - start) / duration);
    step(share < 0.5 ? 2 * share * share : 1 - (2 - 2 * share) ** 2 / 2);
    if (share < 1) requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
}
function moveTo(x, y, scale) {
  const from = { ...view };
  animate(350, (t) => {
    view.x = from.x + (x - from.x) * t;
    view.y = from.y + (y - from.y) * t;
    view.scale = from.scale * (scale / from.scale) ** t;
    redraw();
  });
}
const showAll = () => moveTo(0.5, 0.5, fitScale());
// Move so that the given share of some rows, the ones nearest to their middle, is visible.
function showRows(rows, share = 0.9) {
  const place = (axis) => rows.map((i) => points[2 * i + axis]).sort((a, b) => a - b);
  const low = Math.floor((rows.length * (1 - share)) / 2), high = rows.length - 1 - low;
  const xs = place(0), ys = place(1);
  const span = Math.max(xs[high] - xs[low], ys[high] - ys[low], 1e-3);
  moveTo((xs[low] + xs[high]) / 2, (ys[low] + ys[high]) / 2,
    Math.min(fitScale() / span / 1.25, fitScale() * 40));
}
// Move to a row, so close that most of the rows near it are visible.
function showAround(row, near) {
  const apart = near.map((n) => Math.hypot(points[2 * n.row] - points[2 * row],
    points[2 * n.row + 1] - points[2 * row + 1])).sort((a, b) => a - b);
  const reach = Math.max(apart[Math.floor(apart.length * 0.6)] ?? 0, 0.012);
  moveTo(points[2 * row], points[2 * row + 1],
    Math.min(fitScale() * 40, Math.max(fitScale() * 1.2, (fitScale() * 0.42) / reach)));
}
function showCluster(which) {
  const rows = [];
  for (let i = 0; i < count; i++) if (clusters[i] === which) rows.push(i);
  showRows(rows);
}
function switchLayout(name) {
  const from = Float32Array.from(points), to = layouts[name];
  layoutName = name;
  animate(700, (t) => {
    for (let i = 0; i < points.length; i++) points[i] = from[i] + (to[i] - from[i]) * t;
    if (t === 1) indexPoints();
    redraw();
  });
}

// ---- Selection ----

function select(row, { move = true } = {}) {
  const near = nearest([[1, row]], 15);
  selected = { row, terms: [[1, row]], title: words[row], near };
  showPanel();
  if (move) showAround(row, near);
  redraw();
}
function selectSum(terms) {
  if (terms.length === 1) return select(terms[0][1]);
  const near = nearest(terms, 15);
  const title = terms.map(([sign, row], i) =>
    `${sign < 0 ? "− " : i ? "+ " : ""}${words[row]}`).join(" ");
  selected = { row: null, terms, title, near };
  showPanel();
  showRows([...terms.map(([, row]) => row), ...near.slice(0, 5).map((n) => n.row)], 1);
}
function clear() {
  selected = null;
  showPanel();
  redraw();
}
function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}
function showPanel() {
  const panel = $("panel");
  panel.replaceChildren();
  if (selected) {
    panel.append(element("h2", selected.title));
    if (selected.row !== null) {
      const facts = element("dl");
      for (const [name, value] of [
        ["row", `${data.places[selected.row].toLocaleString("en")} of ${data.rows.toLocaleString("en")}`],
        ["norm", norms[selected.row].toPrecision(4)],
        ["cluster", data.labels[clusters[selected.row]].join(", ")],
      ]) facts.append(element("dt", name), element("dd", value));
      panel.append(facts);
    }
    panel.append(element("h3", "Nearest, by cosine"));
    const list = element("ol", undefined, { id: "near" });
    for (const { row, cosine } of selected.near) {
      const item = element("li"), button = element("button", undefined, { type: "button" });
      button.style.setProperty("--share", `${Math.max(0, cosine) * 100}%`);
      button.append(element("span", words[row]), element("b", cosine.toFixed(3)));
      button.onclick = () => select(row);
      item.append(button);
      list.append(item);
    }
    panel.append(list);
  } else {
    panel.append(element("h2", "Explore"),
      element("p", "Click a point, or search a word, to see its nearest words. "
        + "Scroll or pinch to zoom, drag to move."));
  }
  appendSums(panel);
  if (!selected) appendClusters(panel);
  panel.append(element("p", data.note));
}
function appendSums(panel) {
  panel.append(element("h3", "Add and subtract words"));
  const form = element("form"), sum = element("input", undefined, {
    type: "text", id: "sum", "aria-label": "Words joined by + and -",
    placeholder: "king - man + woman", autocomplete: "off", spellcheck: "false",
  });
  const problem = element("p", "", { role: "alert", id: "problem" });
  form.append(sum, element("button", "Show", { type: "submit" }));
  form.onsubmit = (event) => {
    event.preventDefault();
    const terms = parseSum(sum.value);
    if (typeof terms === "string") problem.textContent = terms;
    else selectSum(terms);
  };
  panel.append(form, problem);
}
function appendClusters(panel) {
  panel.append(element("h3", "Clusters, named by words near their center"));
  const list = element("ul", undefined, { id: "clusters" });
  data.labels.forEach((names, i) => {
    const item = element("li"), button = element("button", undefined, { type: "button" });
    const dot = element("i");
    if ($("color").value === "cluster") dot.style.background = `rgb(${palette[i]})`;
    button.append(dot, element("span", names.join(", ")));
    button.onclick = () => showCluster(i);
    item.append(button);
    list.append(item);
  });
  panel.append(list);
}

// ---- Search ----

const search = $("search"), suggestions = $("suggestions");
let offered = [], active = -1;
function suggest() {
  const text = search.value.trim().split(/\s[+\-−]\s/).pop().trim().toLowerCase();
  offered = [];
  if (text) {
    const inside = [];
    for (let i = 0; i < count && offered.length < 8; i++) {
      const at = words[i].toLowerCase().indexOf(text);
      if (at === 0) offered.push(i);
      else if (at > 0 && inside.length < 8) inside.push(i);
    }
    const exact = find(text);
    if (exact !== undefined) offered = [exact, ...offered.filter((i) => i !== exact)];
    offered = [...offered, ...inside].slice(0, 8);
  }
  active = -1;
  suggestions.replaceChildren(...offered.map((row, i) => {
    const item = element("li", undefined, { role: "option", id: `option-${i}` });
    item.append(element("span", words[row]), element("small", data.places[row].toLocaleString("en")));
    item.onpointerdown = (event) => {
      event.preventDefault();
      choose(row);
    };
    return item;
  }));
  suggestions.hidden = !offered.length;
  search.setAttribute("aria-expanded", String(offered.length > 0));
}
function mark(index) {
  active = index;
  [...suggestions.children].forEach((item, i) =>
    item.setAttribute("aria-selected", String(i === index)));
  search.setAttribute("aria-activedescendant", index < 0 ? "" : `option-${index}`);
  suggestions.children[index]?.scrollIntoView({ block: "nearest" });
}
function closeSuggestions() {
  suggestions.hidden = true;
  search.setAttribute("aria-expanded", "false");
}
function choose(row) {
  // The chosen word completes the last word of a sum.
  const parts = search.value.split(/(\s[+\-−]\s)/);
  parts[parts.length - 1] = words[row];
  search.value = parts.join("");
  run();
}
function run() {
  closeSuggestions();
  const terms = parseSum(search.value);
  if (typeof terms !== "string") return selectSum(terms);
  showPanel();
  $("problem").textContent = terms;
}
search.addEventListener("input", suggest);
search.addEventListener("blur", closeSuggestions);
search.addEventListener("keydown", (event) => {
  const { key } = event;
  if ((key === "ArrowDown" || key === "ArrowUp") && offered.length) {
    event.preventDefault();
    const step = key === "ArrowDown" ? 1 : -1;
    mark((active + step + offered.length + (active < 0 && step < 0)) % offered.length);
  } else if (key === "Enter" && search.value.trim()) {
    if (active >= 0) choose(offered[active]);
    else if (find(search.value.trim()) === undefined && offered.length
      && !/\s[+\-−]\s/.test(search.value)) choose(offered[0]);
    else run();
  } else if (key === "Escape") {
    closeSuggestions();
    canvas.focus();
  }
});

// ---- Pointer and keyboard ----

const fingers = new Map();
let moved = 0, pinch = 0;
canvas.addEventListener("pointerdown", (event) => {
  canvas.setPointerCapture(event.pointerId);
  fingers.set(event.pointerId, [event.offsetX, event.offsetY]);
  moved = 0;
});
canvas.addEventListener("pointermove", (event) => {
  const here = [event.offsetX, event.offsetY], before = fingers.get(event.pointerId);
  if (!before) return hover(...here);
  fingers.set(event.pointerId, here);
  if (fingers.size === 2) {
    const [a, b] = [...fingers.values()], apart = Math.hypot(a[0] - b[0], a[1] - b[1]);
    if (pinch) zoomAt(apart / pinch, (a[0] + b[0]) / 2, (a[1] + b[1]) / 2);
    [pinch, moved] = [apart, 9];
    return;
  }
  const dx = here[0] - before[0], dy = here[1] - before[1];
  moved += Math.abs(dx) + Math.abs(dy);
  if (moved < 4) return;
  canvas.classList.add("dragging");
  view.x -= dx / view.scale;
  view.y -= dy / view.scale;
  redraw();
});
for (const name of ["pointerup", "pointercancel"])
  canvas.addEventListener(name, (event) => {
    fingers.delete(event.pointerId);
    canvas.classList.remove("dragging");
    pinch = 0;
    if (name === "pointercancel" || moved >= 4) return;
    const row = pointAt(event.offsetX, event.offsetY);
    if (row < 0) clear();
    else select(row, { move: false });
  });
canvas.addEventListener("pointerleave", () => hover(-1e6, -1e6));
canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  zoomAt(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0016)), event.offsetX,
    event.offsetY);
}, { passive: false });
canvas.addEventListener("dblclick", (event) => zoomAt(2, event.offsetX, event.offsetY));
function hover(x, y) {
  const row = pointAt(x, y, 10), tip = $("tip");
  if (row !== hovered) redraw();
  hovered = row;
  tip.hidden = row < 0;
  if (row < 0) return;
  tip.textContent = words[row];
  tip.style.left = `${Math.min(x + 14, stageWidth - 120)}px`;
  tip.style.top = `${Math.max(4, y - 30)}px`;
}
addEventListener("keydown", (event) => {
  if (event.target.closest("input, select, button, summary") || event.ctrlKey || event.metaKey)
    return;
  const step = 80 / view.scale;
  const actions = {
    "ArrowLeft": () => { view.x -= step; redraw(); },
    "ArrowRight": () => { view.x += step; redraw(); },
    "ArrowUp": () => { view.y -= step; redraw(); },
    "ArrowDown": () => { view.y += step; redraw(); },
    "+": () => zoomAt(1.3), "=": () => zoomAt(1.3), "-": () => zoomAt(1 / 1.3),
    "0": showAll, "Escape": clear, "/": () => { search.focus(); search.select(); },
    // The point in the middle: a selection without a pointer.
    "Enter": () => {
      const row = pointAt(stageWidth / 2, stageHeight / 2, 200);
      if (row >= 0) select(row);
    },
  };
  if (!(event.key in actions)) return;
  event.preventDefault();
  actions[event.key]();
});
$("closer").onclick = () => zoomAt(1.5);
$("farther").onclick = () => zoomAt(1 / 1.5);
$("everything").onclick = showAll;
$("layout").onchange = (event) => switchLayout(event.target.value);
$("color").onchange = recolor;
for (const id of ["size", "labels", "density"]) $(id).onchange = redraw;
$("theme").onclick = () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  recolor();
};
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolor);
new ResizeObserver(resize).observe(canvas.parentElement);

indexPoints();
resize();
view.scale = fitScale();
recolor();
