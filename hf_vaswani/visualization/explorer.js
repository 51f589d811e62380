"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const redraws = [];

// ---- Elements, colours, keys ------------------------------------------------------------------------------------

function element(name, attributes = {}, ...children) {
  const space = ["svg", "g", "rect", "path", "text", "circle", "title"].includes(name);
  const made = space ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

function section(id, title, where, ...children) {
  // In a frame of a notebook, following the link would load the notebook.
  const go = (event) => {
    event.preventDefault();
    document.getElementById(id).scrollIntoView();
    document.getElementById(`${id}-title`).focus();
  };
  document.getElementById("contents").append(element("li", {}, element("a", { href: `#${id}`, onclick: go }, title)));
  const head = element("header", {}, element("h2", { id: `${id}-title`, tabindex: "-1" }, title), element("p", { class: "where" }, where));
  const made = element("section", { id, "aria-labelledby": `${id}-title` }, head, ...children);
  document.getElementById("main").append(made);
  return made;
}

function note(text) {
  return element("p", { class: "note" }, text);
}

function table(caption, heads, rows) {
  const cell = (name, content, number) => element(name, { class: number ? "number" : null, scope: name === "th" ? "col" : null }, content);
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    element("table", {},
      element("caption", {}, caption),
      element("thead", {}, element("tr", {}, ...heads.map(([text, number]) => cell("th", text, number)))),
      element("tbody", {}, ...rows)));
}

// Names of tokens are read aloud without the sign for a space.
function spoken(piece) {
  return piece.replaceAll("␣", " ").trim() || "space";
}

function say(text) {
  document.getElementById("live").textContent = text;
}

function fixed(value, digits) {
  return value === null ? "–" : value.toFixed(digits).replace("-", "−");
}

function percent(value) {
  if (value === null) return "–";
  return value > 0 && value < 0.001 ? "< 0.1 %" : `${(100 * value).toFixed(1)} %`;
}

// A colour of the style sheet as the numbers of red, green and blue.
function colour(name) {
  const probe = element("span", { style: `color: var(--${name})` });
  document.body.append(probe);
  const numbers = getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).map(Number);
  probe.remove();
  return numbers;
}

function between(from, to, share) {
  return from.map((value, i) => Math.round(value + (to[i] - value) * share));
}

function bytes(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

const MOVES = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };

// Arrow keys move the focus within a group, which has one stop of the Tab key.
function rove(group, items, columns) {
  items.forEach((item, i) => {
    item.setAttribute("tabindex", i === 0 ? "0" : "-1");
    item.addEventListener("focus", () => {
      for (const other of items) other.setAttribute("tabindex", other === item ? "0" : "-1");
    });
  });
  group.addEventListener("keydown", (event) => {
    const at = items.indexOf(document.activeElement);
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, Home: -at, End: items.length - 1 - at };
    if (at < 0 || !(event.key in steps)) return;
    event.preventDefault();
    items[Math.min(items.length - 1, Math.max(0, at + steps[event.key]))].focus();
  });
}

function setUpColours() {
  const button = document.getElementById("theme");
  const isDark = () => (root.style.colorScheme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const redraw = () => {
    button.textContent = isDark() ? "Light colours" : "Dark colours";
    for (const each of redraws) each();
  };
  button.addEventListener("click", () => {
    root.style.colorScheme = isDark() ? "light" : "dark";
    redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  // Paper is white.
  let before = "";
  addEventListener("beforeprint", () => {
    before = root.style.colorScheme;
    root.style.colorScheme = "light";
    redraw();
  });
  addEventListener("afterprint", () => {
    root.style.colorScheme = before;
    redraw();
  });
  redraw();
}

// ---- Words --------------------------------------------------------------------------------------------------------

function drawWords() {
  const words = data.words;
  const links = words.links || [];
  const items = { source: [], target: [] };
  const reading = element("p", { class: "reading" }, "Point at a word, or move to it by Tab and arrow keys.");
  let pinned = null;

  function texts(side) {
    return items[side].map((item) => item.textContent);
  }

  function show(side, number) {
    for (const each of [...items.source, ...items.target]) each.classList.remove("linked");
    const found = links.filter((link) => link[side === "source" ? 0 : 1] === number);
    items[side][number].classList.add("linked");
    const other = side === "source" ? "target" : "source";
    const names = found.map((link) => {
      const place = link[other === "source" ? 0 : 1];
      items[other][place].classList.add("linked");
      return `${texts(other)[place]} (attention ${percent(link[2])})`;
    });
    let text = texts(side)[number];
    if (side === "target" && words.probabilities[number] !== null) text += `: probability ${percent(words.probabilities[number])}`;
    if (names.length) text += `${side === "target" ? ", made from " : ": became "}${names.join(", ")}`;
    else if (data.kind === "translation") text += side === "target" ? ", made from no word" : ": no word was made from it";
    reading.textContent = `${text}.`;
    return text;
  }

  function restore() {
    for (const each of [...items.source, ...items.target]) each.classList.remove("linked");
    for (const side of ["source", "target"]) {
      const focused = items[side].indexOf(document.activeElement);
      if (focused >= 0) {
        show(side, focused);
        return;
      }
    }
    if (pinned) show(...pinned);
    else reading.textContent = "Point at a word, or move to it by Tab and arrow keys.";
  }

  function paragraph(side, label) {
    const line = element("p", { class: "text", role: "group", "aria-label": label, dir: "auto" });
    for (const [text, number] of words[side]) {
      // An encoder on its own makes no words.
      if (number === undefined || !words.target) {
        line.append(text);
        continue;
      }
      const probability = side === "target" ? words.probabilities[number] : null;
      const word = element("button", {
        type: "button", class: "word", "aria-pressed": "false",
        "data-doubt": probability === null ? null : "",
        style: probability === null ? null : `--doubt: ${1 - probability}`,
        onmouseenter: () => show(side, number),
        onmouseleave: restore,
        onfocus: () => say(show(side, number)),
        onblur: restore,
        onclick: () => {
          const again = pinned && pinned[0] === side && pinned[1] === number;
          for (const each of [...items.source, ...items.target]) each.setAttribute("aria-pressed", "false");
          pinned = again ? null : [side, number];
          word.setAttribute("aria-pressed", String(!again));
          show(side, number);
        },
      }, text);
      items[side][number] = word;
      line.append(word);
    }
    if (words.target) rove(line, items[side], 1);
    return line;
  }

  const labels = { translation: ["Source", "Translation"], decoder: ["", "Text"], encoder: ["Text", ""] }[data.kind];
  const parts = [];
  const isBoth = words.source && words.target;
  if (words.source) parts.push(isBoth ? element("p", { class: "label" }, labels[0]) : null, paragraph("source", labels[0]));
  if (words.target) {
    parts.push(isBoth ? element("p", { class: "label" }, labels[1]) : null, paragraph("target", labels[1]), reading,
      element("p", { class: "note" }, "Background: probability of the word, given those before it: 100 % ",
        element("span", { class: "ramp", role: "img", "aria-label": "from no colour to a strong one" }), " 0 %"));
  }
  const where = { translation: "Sections 3.1 and 3.2.3", decoder: "Section 3.1", encoder: "Section 3.1" }[data.kind];
  section("words", data.kind === "translation" ? "Translation" : "Text", where, ...parts.filter((part) => part !== null));
}

function drawPredictions() {
  if (!data.predictions.length) return;
  const rows = data.predictions.flatMap(({ title, rows: best }) => best.map(([label, probability], i) => element("tr", { class: i ? null : "best" },
    element("td", { class: "piece" }, i ? "" : title), element("td", {}, String(label)),
    element("td", { class: "number share", style: `--share: ${100 * probability}%` }, percent(probability)))));
  section("predictions", "Predictions", "the head of this model", table("What the model says", [["Of"], ["Prediction"], ["Probability", true]], rows));
}

// ---- Search -------------------------------------------------------------------------------------------------------

function drawBest() {
  const { hypotheses, settings } = data.search;
  if (settings.num_beams === 1) return;
  const rows = hypotheses.map((each, i) => element("tr", { class: i ? null : "best" },
    element("td", { class: "number" }, String(i + 1)), element("td", { dir: "auto" }, each.text + (each.cut ? " … (cut)" : "")),
    element("td", { class: "number" }, String(each.length)), element("td", { class: "number" }, fixed(each.total, 3)),
    element("td", { class: "number" }, fixed(each.penalty, 3)), element("td", { class: "number" }, fixed(each.score, 4))));
  section("best", "Finished hypotheses", "Section 6.1",
    table("The hypotheses that had finished when the search stopped, best first",
      [["", true], ["Hypothesis"], ["Tokens", true], ["Log-probability", true], ["Length penalty", true], ["Score", true]], rows),
    note("Score = log-probability / length penalty. The first one is the result."));
}

function drawSearch() {
  const { steps, tokens, hypotheses, settings, stop } = data.search;
  const stopped = stop.replace(/-(?=\d)/g, "−");
  const beams = settings.num_beams;
  const isBeam = beams > 1;
  const best = new Set();
  let [step, candidate] = hypotheses[0].path;
  for (; step >= 0; step -= 1) {
    best.add(`${step} ${candidate}`);
    const parent = steps[step].candidates[candidate][0];
    candidate = step ? steps[step - 1].candidates.findIndex((each) => each[5] === parent) : -1;
  }
  const scoreOf = (at, index) => {
    const found = hypotheses.find((each) => each.path[0] === at && each.path[1] === index);
    return found ? `, score ${fixed(found.score, 3)}` : "";
  };

  function fate(at, each, index) {
    const [, , , , ends, rank, finished] = each;
    if (finished) return ["done", isBeam ? `finished${scoreOf(at, index) || ", replaced later"}` : "taken: the end"];
    if (rank !== null && isBeam && at === steps.length - 1) return ["pruned", "left when the search stopped"];
    if (rank !== null) return ["kept", isBeam ? `goes on as hypothesis ${rank + 1}` : "taken"];
    return ["pruned", ends ? "ends, dropped" : "dropped"];
  }

  const panel = element("div", { class: "columns" });
  const label = element("output", { for: "step" });
  const slider = element("input", { type: "range", id: "step", min: "1", max: String(steps.length), value: "1", "aria-label": "Step of the search" });

  function show() {
    const at = Number(slider.value) - 1;
    const { running, candidates, finished, upper_bound: upperBound, threshold } = steps[at];
    label.textContent = `Step ${at + 1} of ${steps.length}`;
    slider.setAttribute("aria-valuetext", label.textContent);
    const rows = candidates.map((each, i) => {
      const [kind, text] = fate(at, each, i);
      const probability = Math.exp(each[2]);
      return element("tr", { class: kind },
        isBeam ? element("td", { class: "number" }, String(each[0] + 1)) : null,
        element("td", { class: "piece" }, tokens[each[1]]),
        element("td", { class: "number share", style: `--share: ${100 * probability}%` }, percent(probability)),
        element("td", { class: "number" }, fixed(each[3], 3)), element("td", { class: "fate" }, text));
    });
    const before = running.map((text, i) => element("tr", {}, element("td", { class: "number" }, String(i + 1)), element("td", { dir: "auto" }, text || "(nothing yet)")));
    const done = finished.map(([where, index], i) => {
      const found = hypotheses.find((each) => each.path[0] === where && each.path[1] === index);
      const total = steps[where].candidates[index][3];
      return element("tr", {}, element("td", { class: "number" }, String(i + 1)), element("td", { dir: "auto" }, found ? found.text : `ended in step ${where + 1}, replaced later`),
        element("td", { class: "number" }, found ? fixed(found.score, 3) : `log-probability ${fixed(total, 3)}`));
    });
    const left = element("div", {},
      table(isBeam ? "Running hypotheses" : "Text so far", [["", true], ["Text"]], before),
      isBeam ? table("Finished hypotheses after this step", [["", true], ["Text"], ["Score", true]], done.length ? done : [element("tr", {}, element("td", { colspan: "3" }, "none yet"))]) : null);
    if (isBeam) {
      const isLast = at === steps.length - 1;
      let why = `The best running hypothesis could still reach a score of ${fixed(upperBound, 3)}, and needs more than ${fixed(threshold, 3)}.`;
      if (upperBound === null) why = "No hypothesis is running any more.";
      else if (threshold === null) why = "The search goes on: too few hypotheses have finished.";
      left.append(note(isLast ? `The search stopped here. ${stopped}` : why));
    }
    panel.replaceChildren(
      table(isBeam ? "Candidates: the best continuations of all running hypotheses" : "Most probable next tokens",
        [...(isBeam ? [["Extends", true]] : []), ["Token"], ["Probability", true], ["Log-probability", true], ["What becomes of it"]], rows), left);
    drawNow(at);
  }

  // All hypotheses as a picture: a column for each step, a row for each running hypothesis, and below them the ends.
  const endsOf = ({ candidates }) => candidates.filter((each) => each[6]).length;
  const wide = 96, high = 26, rows = beams + (isBeam ? Math.max(...steps.map(endsOf)) : 0);
  const picture = element("svg", { width: wide * steps.length + 8, height: high * rows + 24, viewBox: `0 0 ${wide * steps.length + 8} ${high * rows + 24}`, role: "img",
    "aria-label": `The search as a tree with ${steps.length} steps; the table of each step says the same` });
  const now = element("rect", { class: "now", y: 0, width: wide, height: high * rows + 24 });
  picture.append(now);
  const tree = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "The search as a tree" }, picture);
  const drawNow = (at) => {
    now.setAttribute("x", at * wide);
    tree.scrollLeft = (at + 0.5) * wide - tree.clientWidth / 2;
  };
  const shorten = (text) => (text.length > 10 ? `${text.slice(0, 9)}…` : text);
  steps.forEach(({ candidates }, at) => {
    picture.append(element("text", { x: at * wide + 6, y: 12 }, String(at + 1)));
    const shown = candidates.map((each, i) => [each, i]).filter(([each]) => each[5] !== null || each[6]);
    let ends = isBeam ? beams : 0;
    for (const [each, i] of shown) {
      const [x, y] = [at * wide + 6, 20 + high * (each[5] === null ? ends++ : each[5])];
      const isBest = best.has(`${at} ${i}`);
      if (at) {
        const fromY = 20 + high * each[0] + 10;
        const fromX = (at - 1) * wide + 6 + wide - 22;
        picture.append(element("path", { class: isBest ? "edge best" : "edge", d: `M${fromX} ${fromY} C${fromX + 12} ${fromY} ${x - 12} ${y + 10} ${x} ${y + 10}` }));
      }
      const node = element("g", { class: `node${isBest ? " best" : ""}${each[5] === null ? " end" : ""}`, onclick: () => { slider.value = at + 1; show(); } },
        element("title", {}, `${tokens[each[1]]}: log-probability ${fixed(each[3], 3)}`),
        element("rect", { x, y, width: wide - 22, height: 20, rx: 3 }),
        element("text", { x: x + 4, y: y + 14 }, shorten(tokens[each[1]])));
      picture.append(node);
    }
  });

  const move = (by) => () => { slider.value = Number(slider.value) + by; slider.dispatchEvent(new Event("input")); };
  slider.addEventListener("input", show);
  section("search", isBeam ? "Beam search, step by step" : settings.do_sample ? "Sampling, step by step" : "Greedy search, step by step", "Section 6.1",
    element("div", { class: "controls" }, element("button", { type: "button", onclick: move(-1), "aria-label": "Previous step" }, "←"), slider,
      element("button", { type: "button", onclick: move(1), "aria-label": "Next step" }, "→"), label),
    tree, panel,
    note(isBeam
      ? `Each of the ${beams} running hypotheses is extended by every token, and the most probable results are the candidates. Those that do not end go on, up to ${beams}. Those that end are finished hypotheses, ranked by score. Blue: the result.`
      : `Each step takes ${settings.do_sample ? "a token drawn by its probability" : "the most probable token"}.`),
    note("The probabilities are those that the search used, after settings that change them, such as a temperature."),
    element("p", {}, element("strong", {}, `It stopped after ${steps.length} step${steps.length > 1 ? "s" : ""}. `), stopped));
  show();
}

// ---- Attention ----------------------------------------------------------------------------------------------------

const KINDS = {
  encoder: ["Encoder", "each source token attends to all source tokens"],
  decoder: ["Decoder", "each position attends to itself and those before it"],
  cross: ["Decoder to encoder", "each position of the decoder attends to all source tokens"],
};

function drawAttention() {
  const kinds = Object.keys(KINDS).filter((kind) => kind in data.attention);
  const state = { kind: kinds[kinds.length - 1], layer: 0, head: 0, row: 0, column: 0, scaled: false };
  state.layer = data.attention[state.kind].shape[0] - 1;
  const weights = {};
  for (const kind of kinds) {
    const raw = bytes(data.attention[kind].weights);
    weights[kind] = Float32Array.from({ length: raw.length / 2 }, (_, i) => (raw[2 * i] + 256 * raw[2 * i + 1]) / 65535);
  }
  const at = (kind, layer, head, row, column) => {
    const [, heads, rows, columns] = data.attention[kind].shape;
    return weights[kind][((layer * heads + head) * rows + row) * columns + column];
  };
  // The weight that has the full colour.
  const most = (kind, layer, head) => {
    const [, heads, rows, columns] = data.attention[kind].shape;
    const start = (layer * heads + head) * rows * columns;
    if (!state.scaled) return 1;
    return weights[kind].subarray(start, start + rows * columns).reduce((most, weight) => Math.max(most, weight), 1e-6);
  };
  const grid = element("div", { class: "scroll" });
  const caption = element("h3", {});
  const roles = element("p", { class: "note" });
  const canvas = element("canvas", { class: "large", tabindex: "0", role: "img" });
  const reading = element("p", { class: "reading" });
  const geometry = { cell: 0, left: 0, top: 0 };

  function rowName(row) {
    const { rows, predicted } = data.attention[state.kind];
    return predicted ? `${rows[row]} → ${predicted[row]}` : rows[row];
  }

  function drawSmall(small, kind, layer, head) {
    const [, , rows, columns] = data.attention[kind].shape;
    small.width = columns;
    small.height = rows;
    const context = small.getContext("2d");
    const image = context.createImageData(columns, rows);
    const [low, high, full] = [colour("surface"), colour("accent"), most(kind, layer, head)];
    for (let row = 0; row < rows; row += 1) {
      for (let column = 0; column < columns; column += 1) {
        image.data.set([...between(low, high, at(kind, layer, head, row, column) / full), 255], 4 * (row * columns + column));
      }
    }
    context.putImageData(image, 0, 0);
  }

  function drawGrid() {
    const { kind } = state;
    const [layers, heads] = data.attention[kind].shape;
    const buttons = [];
    const rows = [];
    for (let layer = 0; layer < layers; layer += 1) {
      const cells = [];
      for (let head = 0; head < heads; head += 1) {
        const [role] = data.attention[kind].roles[layer][head];
        const strong = role && role[1] >= 0.5;
        const small = element("canvas", { "aria-hidden": "true" });
        drawSmall(small, kind, layer, head);
        const text = role ? `${role[0]} ${Math.round(100 * role[1])} %` : "";
        const button = element("button", { type: "button", role: "radio", "aria-checked": "false", "aria-label": `Layer ${layer + 1}, head ${head + 1}; ${text}`,
          onclick: () => { Object.assign(state, { layer, head }); mark(); drawLarge(); },
          onfocus: () => { Object.assign(state, { layer, head }); mark(); drawLarge(); } },
          small, element("span", { class: strong ? "role strong" : "role" }, text));
        buttons.push(button);
        cells.push(element("td", {}, button));
      }
      rows.push(element("tr", {}, element("th", { scope: "row" }, String(layer + 1)), ...cells));
    }
    const numbers = Array.from({ length: heads }, (_, head) => element("th", { scope: "col" }, String(head + 1)));
    const made = element("table", { class: "grid", role: "radiogroup", "aria-label": `${KINDS[kind][0]} attention: layers and heads` },
      element("caption", {}, "Rows: layers, from the bottom of the stack. Columns: heads."),
      element("thead", {}, element("tr", {}, element("td", {}), ...numbers)), element("tbody", {}, ...rows));
    const mark = () => buttons.forEach((button, i) => button.setAttribute("aria-checked", String(i === state.layer * heads + state.head)));
    rove(made, buttons, heads);
    const chosen = buttons[state.layer * heads + state.head];
    for (const button of buttons) button.setAttribute("tabindex", button === chosen ? "0" : "-1");
    grid.replaceChildren(made);
    mark();
  }

  function drawLarge() {
    const { kind, layer, head } = state;
    const { shape: [, , rows, columns], columns: names } = data.attention[kind];
    state.row = Math.min(state.row, rows - 1);
    state.column = Math.min(state.column, columns - 1);
    caption.textContent = `${KINDS[kind][0]}, layer ${layer + 1}, head ${head + 1}: ${KINDS[kind][1]}`;
    roles.textContent = `Share of its attention, on average over this text: ${data.attention[kind].roles[layer][head].map(([name, share]) => `${name} ${percent(share)}`).join(", ")}.`;
    const font = "12px ui-monospace, 'DejaVu Sans Mono', monospace";
    const context = canvas.getContext("2d");
    context.font = font;
    const labels = Array.from({ length: rows }, (_, row) => rowName(row));
    const cell = Math.max(14, Math.min(30, Math.floor(640 / Math.max(rows, columns))));
    const left = Math.ceil(Math.max(...labels.map((text) => context.measureText(text).width))) + 8;
    const top = Math.ceil(Math.max(...names.map((text) => context.measureText(text).width))) + 8;
    Object.assign(geometry, { cell, left, top });
    const [width, height] = [left + columns * cell + 1, top + rows * cell + 1];
    const ratio = Math.max(1, devicePixelRatio || 1);
    Object.assign(canvas, { width: width * ratio, height: height * ratio });
    Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
    context.scale(ratio, ratio);
    context.font = font;
    const css = (numbers) => `rgb(${numbers.join(" ")})`;
    const [low, high, ink, mark] = [colour("surface"), colour("accent"), colour("ink"), colour("warm")];
    const full = most(kind, layer, head);
    context.fillStyle = css(ink);
    context.textBaseline = "middle";
    context.textAlign = "right";
    labels.forEach((text, row) => context.fillText(text, left - 5, top + (row + 0.5) * cell));
    context.textAlign = "left";
    names.forEach((text, column) => {
      context.save();
      context.translate(left + (column + 0.5) * cell, top - 5);
      context.rotate(-Math.PI / 2);
      context.fillText(text, 0, 0);
      context.restore();
    });
    for (let row = 0; row < rows; row += 1) {
      for (let column = 0; column < columns; column += 1) {
        context.fillStyle = css(between(low, high, at(kind, layer, head, row, column) / full));
        context.fillRect(left + column * cell, top + row * cell, cell - 1, cell - 1);
      }
    }
    context.strokeStyle = css(mark);
    context.lineWidth = 2;
    context.strokeRect(left + state.column * cell, top + state.row * cell, cell - 1, cell - 1);
    canvas.setAttribute("aria-label", `${caption.textContent}. Arrow keys read its weights.`);
    reading.textContent = `${describe()}.`;
  }

  function describe() {
    const { kind, layer, head, row, column } = state;
    const names = data.attention[kind].columns;
    return `${rowName(row)} attends to ${names[column]}: ${percent(at(kind, layer, head, row, column))}`;
  }

  canvas.addEventListener("mousemove", (event) => {
    const [, , rows, columns] = data.attention[state.kind].shape;
    const column = Math.floor((event.offsetX - geometry.left) / geometry.cell);
    const row = Math.floor((event.offsetY - geometry.top) / geometry.cell);
    if (row < 0 || column < 0 || row >= rows || column >= columns || (row === state.row && column === state.column)) return;
    Object.assign(state, { row, column });
    drawLarge();
  });
  canvas.addEventListener("keydown", (event) => {
    if (!(event.key in MOVES)) return;
    event.preventDefault();
    const [, , rows, columns] = data.attention[state.kind].shape;
    state.row = Math.min(rows - 1, Math.max(0, state.row + MOVES[event.key][0]));
    state.column = Math.min(columns - 1, Math.max(0, state.column + MOVES[event.key][1]));
    drawLarge();
    say(spoken(describe()));
  });

  const choices = kinds.map((kind) => element("label", {}, element("input", { type: "radio", name: "kind", value: kind, checked: kind === state.kind ? "" : null,
    onchange: () => { state.kind = kind; state.layer = Math.min(state.layer, data.attention[kind].shape[0] - 1); drawGrid(); drawLarge(); } }), ` ${KINDS[kind][0]}`));
  const scaled = element("label", {}, element("input", { type: "checkbox", onchange: (event) => { state.scaled = event.target.checked; drawGrid(); drawLarge(); } }),
    " Full colour for the largest weight of each head, in place of 100 %");
  section("attention", "Attention", "Sections 3.2.1 to 3.2.3",
    element("fieldset", {}, element("legend", {}, "Attention of"), ...choices, scaled),
    element("div", { class: "columns" }, grid,
      element("div", {}, caption, roles, element("div", { class: "scroll" }, canvas), reading)),
    note(`Each row adds up to 100 %: softmax(Q Kᵀ / √d_k).${data.kind === "encoder" ? "" : " Rows of the decoder: the token that it reads → the token that it predicts next."} A name in green: half of the head's attention or more goes there, on average over this text.`));
  redraws.push(() => { drawGrid(); drawLarge(); });
}

// ---- Positions ----------------------------------------------------------------------------------------------------

function drawPositions() {
  const isLearned = data.positions[0].layout === null;
  section("positions", "Positions", isLearned ? "Section 3.5, Table 3 (E)" : "Section 3.5", ...data.positions.flatMap(positionPlot));
}

function positionPlot({ side, shape: [length, width], first, scale, layout, values }) {
  const numbers = new Int8Array(bytes(values).buffer);
  const name = side === "text" ? "" : ` of the ${side}`;
  const canvas = element("canvas", { class: "positions", role: "img", tabindex: "0" });
  const reading = element("p", { class: "reading" }, "");
  const state = { row: 0, column: 0 };
  const show = () => {
    reading.textContent = `Position ${first + state.row}, dimension ${state.column}: ${fixed(numbers[state.row * width + state.column] / 127 * scale, 2)}`;
    canvas.setAttribute("aria-label", `Encodings of ${length} positions${name} in ${width} dimensions. Arrow keys read them.`);
  };
  canvas.addEventListener("mousemove", (event) => {
    const box = canvas.getBoundingClientRect();
    state.column = Math.min(width - 1, Math.max(0, Math.floor((event.clientX - box.left) / box.width * width)));
    state.row = Math.min(length - 1, Math.max(0, Math.floor((event.clientY - box.top) / box.height * length)));
    show();
  });
  canvas.addEventListener("keydown", (event) => {
    if (!(event.key in MOVES)) return;
    event.preventDefault();
    state.row = Math.min(length - 1, Math.max(0, state.row + MOVES[event.key][0]));
    state.column = Math.min(width - 1, Math.max(0, state.column + MOVES[event.key][1]));
    show();
    say(reading.textContent);
  });
  redraws.push(() => {
    canvas.width = width;
    canvas.height = length;
    canvas.style.height = `${Math.max(96, Math.min(320, 8 * length))}px`;
    const context = canvas.getContext("2d");
    const image = context.createImageData(width, length);
    const [low, middle, high] = [colour("warm"), colour("paper"), colour("accent")];
    numbers.forEach((value, i) => image.data.set([...between(middle, value < 0 ? low : high, Math.abs(value) / 127), 255], 4 * i));
    context.putImageData(image, 0, 0);
  });
  const layouts = {
    interleaved: "Sines in the even dimensions and cosines in the odd ones, with wavelengths from 2π on the left to 10000 · 2π on the right.",
    concatenated: "Sines in the left half and cosines in the right one, with wavelengths from 2π to 10000 · 2π in each.",
    tensor2tensor: "Sines in the left half and cosines in the right one, with wavelengths from 2π to 10000 · 2π in each, as in the paper's own code.",
  };
  show();
  return [canvas, reading,
    note(`Rows: positions ${first} to ${first + length - 1}${name}, from the top. Columns: the ${width} dimensions of d_model. Blue: positive, orange: negative, up to ${fixed(scale, 2)}. ${layout === null ? "These are learned." : layouts[layout]}`)];
}

// ---- Embeddings ---------------------------------------------------------------------------------------------------

function drawEmbeddings() {
  const parts = data.embeddings.plots.flatMap((plot) => [embeddingPlot(plot)]);
  section("embeddings", "Embeddings", "Section 3.4", ...parts,
    note(`The tokens of this text in the plane in which their embeddings differ most (principal component analysis), and the entries of the vocabulary with the greatest cosine.${data.embeddings.shared ? " Source and target share one matrix." : ""}`));
}

function embeddingPlot({ points, explained }) {
  const [wide, high, edge] = [640, 420, 30];
  const all = points.flatMap(([, , x, y, near]) => [[x, y], ...near.map((each) => [each[2], each[3]])]);
  const range = (axis) => [Math.min(...all.map((each) => each[axis])), Math.max(...all.map((each) => each[axis]))];
  const [[left, right], [low, top]] = [range(0), range(1)];
  const scaled = (x, y) => [
    edge + (wide - 2 * edge - 60) * (right > left ? (x - left) / (right - left) : 0.5),
    high - edge - (high - 2 * edge) * (top > low ? (y - low) / (top - low) : 0.5),
  ];
  const picture = element("svg", { viewBox: `0 0 ${wide} ${high}`, width: wide, height: high, role: "listbox", "aria-label": "Tokens; arrow keys choose one" });
  const list = element("div", {});
  const near = element("g", {});
  picture.append(near);
  // A label is left out where another one stands, until its point is chosen.
  const taken = [];
  const fits = (x, y, length) => {
    const box = [x, y - 10, x + length, y + 3];
    if (taken.some((other) => box[0] < other[2] && other[0] < box[2] && box[1] < other[3] && other[1] < box[3])) return false;
    taken.push(box);
    return true;
  };
  const dots = points.map(([piece, side, x, y, neighbours]) => {
    const [px, py] = scaled(x, y);
    const length = 7.3 * piece.length;
    const places = [[px + 7, py + 4], [px - 7 - length, py + 4], [px - length / 2, py - 8], [px - length / 2, py + 17]];
    const free = places.find(([tx, ty]) => tx > 0 && tx + length < wide && fits(tx, ty, length));
    const text = element("text", { x: (free || places[0])[0], y: (free || places[0])[1], visibility: free ? null : "hidden" }, piece);
    const dot = element("g", { class: `dot ${side}`, role: "option", "aria-label": spoken(piece), "aria-selected": "false", onfocus: () => choose(), onclick: () => choose() },
      element("circle", { cx: px, cy: py, r: 5 }), text);
    function choose() {
      for (const other of dots) {
        other.classList.remove("chosen");
        other.setAttribute("aria-selected", "false");
      }
      dot.classList.add("chosen");
      dot.setAttribute("aria-selected", "true");
      near.replaceChildren(...neighbours.map(([name, , nx, ny]) => {
        const [qx, qy] = scaled(nx, ny);
        return element("g", { class: "dot near" }, element("circle", { cx: qx, cy: qy, r: 4 }), element("text", { x: qx + 6, y: qy - 5 }, name));
      }));
      list.replaceChildren(table(`Nearest to ${piece}`, [["Token"], ["Cosine", true]],
        neighbours.map(([name, cosine]) => element("tr", {}, element("td", { class: "piece" }, name), element("td", { class: "number" }, fixed(cosine, 3))))));
    }
    dot.choose = choose;
    return dot;
  });
  picture.append(...dots);
  rove(picture, dots, 1);
  // The first one is often a language tag.
  dots[Math.min(1, dots.length - 1)].choose();
  const key = (name, text) => [element("span", { class: "key", style: `background: var(--${name})` }), text];
  const sides = new Set(points.map((point) => point[1]));
  const names = { source: ["accent", "source"], target: ["warm", data.kind === "decoder" ? "text" : "target"], both: ["good", "both"] };
  const keys = Object.keys(names).filter((side) => sides.has(side)).flatMap((side) => key(...names[side]));
  return element("div", {}, element("p", { class: "note" }, ...keys, ` · variance in this plane: ${percent(explained[0] + explained[1])}`),
    element("div", { class: "columns" }, element("div", { class: "scroll" }, picture), list));
}

// ---- The paper ----------------------------------------------------------------------------------------------------

function drawPaper() {
  const rows = data.paper.map(([where, what, base, here]) => element("tr", {}, element("td", {}, where), element("td", {}, what),
    element("td", { class: "number" }, base), element("td", { class: "number" }, String(here))));
  section("paper", "In the paper", "“Attention Is All You Need”, 2017",
    table("Where each thing stands in the paper, the base model there, and this model", [["Section"], ["What"], ["Base model", true], ["This model", true]], rows));
}

document.getElementById("model").textContent = data.name;
drawWords();
if (data.predictions) drawPredictions();
if (data.search) {
  drawBest();
  drawSearch();
}
drawAttention();
drawPositions();
drawEmbeddings();
drawPaper();
setUpColours();
