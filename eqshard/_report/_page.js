"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const app = document.getElementById("app");
  const [TYPE, SHAPE, ITEM, REST, USE, SPEC, USE_SPEC, MEMORY, WHY, GIVEN_UP] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9];
  const axes = data.mesh.map(([name, size], i) => ({ name, size, colour: `var(--axis${i % 6})` }));
  const devices = axes.reduce((n, axis) => n * axis.size, 1);
  const MOST_CHILDREN = 200;

  // ---- words

  function scaled(n, units, step) {
    let i = 0;
    while (Math.abs(n) >= step && i < units.length - 1) { n /= step; i++; }
    return (i ? n.toFixed(1) : n.toFixed(0)) + units[i];
  }
  const bytes = n => scaled(n, [" B", " kB", " MB", " GB", " TB"], 1000);
  const count = n => scaled(n, ["", " thousand", " million", " billion", " trillion"], 1000);
  const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
  const ratio = x => String(+x.toPrecision(3));

  function el(tag, attributes = {}, ...children) {
    const ns = ["svg", "rect", "text", "g", "title"].includes(tag) ? "http://www.w3.org/2000/svg" : null;
    const node = ns ? document.createElementNS(ns, tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined) node.setAttribute(name, value);
    }
    for (const child of children.flat(9)) if (child !== null && child !== undefined) node.append(child);
    return node;
  }
  const keyed = act => ({
    tabindex: 0, role: "button", onclick: act,
    onkeydown: e => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); act(e); } },
  });
  const axisTag = (axis, text) => el("span", { class: "axis", style: `--c:${axis.colour}` }, text ?? axis.name);

  // ---- layouts

  const cut = names => names.reduce((n, i) => n * axes[i].size, 1);
  const split = layout => layout.reduce((n, names) => n * cut(names), 1);
  const piece = (shape, layout) => shape.map((n, d) => Math.ceil(n / cut(layout[d])));
  const product = shape => shape.reduce((a, b) => a * b, 1);
  const held = (kind, layout) => product(piece(kind[SHAPE], layout)) * kind[ITEM];

  function coordinates(device) {
    const at = [];
    for (let i = axes.length - 1; i >= 0; i--) { at[i] = device % axes[i].size; device = Math.floor(device / axes[i].size); }
    return at;
  }
  const numbers = (layout, at) => layout.map(names => names.reduce((n, i) => n * axes[i].size + at[i], 0));

  function slices(shape, layout, number) {
    return "[" + shape.map((n, d) => {
      if (!layout[d].length) return ":";
      const size = Math.ceil(n / cut(layout[d]));
      return `${Math.min(n, number[d] * size)}:${Math.min(n, (number[d] + 1) * size)}`;
    }).join(", ") + "]";
  }

  // The first dimension that is split gives the hue, the second the lightness, others a shade of both.
  function colour(layout, number) {
    const dims = layout.map((names, d) => d).filter(d => layout[d].length);
    if (!dims.length) return "oklch(var(--piece-high) 0.03 250)";
    const part = d => (cut(layout[d]) === 1 ? 0 : number[d] / cut(layout[d]));
    const hue = 250 + 300 * part(dims[0]);
    const light = dims.length > 1 ? part(dims[1]) : 0.35;
    const chroma = dims.length > 2 ? 0.05 + 0.1 * part(dims[2]) : 0.11;
    return `oklch(calc(var(--piece-high) + (var(--piece-low) - var(--piece-high)) * ${light.toFixed(3)}) ${chroma.toFixed(3)} ${hue.toFixed(1)})`;
  }

  // ---- the tree

  const rows = data.rows.map(([kind, times, ...tokens], number) => {
    const names = tokens.map(i => data.tokens[i]);
    return { number, kind: data.kinds[kind], times, names, path: names.join("") || "(the array)" };
  });
  for (const row of rows) {
    row.bytes = held(row.kind, row.kind[REST]) * row.times;
    row.total = product(row.kind[SHAPE]) * row.kind[ITEM] * row.times;
    row.pieces = split(row.kind[REST]);
    row.shade = row.pieces >= devices ? "--one" : row.pieces > 1 ? "--some" : "--all";
  }

  const fresh = name => ({ name, children: new Map(), bytes: 0, leaves: 0, largest: null, shades: {} });
  const root = fresh("");
  for (const row of rows) {
    let node = root;
    const add = () => {
      node.bytes += row.bytes; node.leaves += row.times;
      node.shades[row.shade] = (node.shades[row.shade] ?? 0) + row.bytes;
      if (!node.largest || row.bytes > node.largest.bytes) node.largest = row;
    };
    add();
    for (const name of row.names) {
      if (!node.children.has(name)) node.children.set(name, fresh(name));
      node = node.children.get(name);
      add();
    }
    node.row = row;
  }

  // A node with one child and no leaf of its own is shown as one line with it.
  function lines(node) {
    return [...node.children.values()].map(child => {
      let name = child.name;
      while (child.children.size === 1 && !child.row) {
        child = child.children.values().next().value;
        name += child.name;
      }
      return { name, node: child };
    });
  }

  // ---- the head of the page

  const t = data.totals;
  const uneven = t.least !== t.most;
  function number(big, small, part) {
    const bar = part === undefined ? null : el("div", { class: "fill" }, el("i", { style: `width:${Math.min(100, 100 * part)}%` }));
    return el("div", { class: "card number" }, el("b", {}, big), el("span", {}, small), bar);
  }
  function head() {
    const sub = el("div", { class: "sub" }, "Mesh");
    axes.forEach((axis, i) => {
      if (i) sub.append("×");
      sub.append(axisTag(axis, `${axis.name} ${axis.size}`));
    });
    sub.append(`= ${plural(devices, "device")}`);
    if (data.chip) sub.append(` of ${data.chip[0]}`);
    if (data.dcn.length) sub.append(` (${data.dcn.join(", ")} across the slower network)`);
    const each = bytes(t.least) !== bytes(t.most) ? `${bytes(t.least)} to ${bytes(t.most)}` : bytes(t.most);
    const title = `${count(t.params)} parameters on ${plural(devices, "device")}, ${each} on each`;
    const cards = [
      number(bytes(t.bytes), `in ${plural(t.leaves, "leaf").replace("leafs", "leaves")}, each counted once`),
      data.chip
        ? number(each, `on each device at rest, of ${bytes(data.chip[1])}`, t.most / data.chip[1])
        : number(each, "on each device at rest"),
      t.use === t.most
        ? number("the same", "in use as at rest")
        : number("+" + bytes(t.gathered), `for the largest leaf gathered for use; ${bytes(t.use)} for all at once`),
      number(ratio(t.replication), t.replication < 1.005 ? "copy of each byte: nothing is there twice" : `copies of a byte on average; ${bytes(t.whole)} whole on every device`),
    ];
    if (uneven) cards.push(number((100 * t.balance).toFixed(0) + " %", "balance: the average device, of the fullest"));
    return [el("h1", {}, title), sub, el("div", { class: "numbers" }, cards)];
  }

  function issues() {
    if (!data.issues.length) {
      const fine = el("span", { class: "tag", style: "--c:var(--axis2)" }, "fine");
      return el("div", { class: "card issues" }, el("div", { class: "issue" }, fine, "Nothing to say against this plan."));
    }
    const MOST = 30;
    const items = data.issues.slice(0, MOST).map(([severity, , path, times, message, remedy, row]) => {
      const where = path ? [el("span", { class: "mono" }, path), times > 1 ? ` (${times} leaves)` : "", ": "] : [];
      const act = row >= 0 ? keyed(() => choose(rows[row], true)) : {};
      return el("div", { class: "issue", ...act },
        el("span", { class: "tag", style: `--c:var(--${severity})` }, severity),
        el("span", {}, where, message, " ", el("span", { class: "remedy" }, remedy)));
    });
    if (data.issues.length > MOST) items.push(el("div", { class: "issue soft" }, `and ${data.issues.length - MOST} more`));
    return el("div", { class: "card issues" }, items);
  }

  // ---- the map of one device's memory: squarified tiles

  function squarify(items, box) {
    const out = [];
    let { x, y, w, h } = box;
    let total = items.reduce((sum, item) => sum + item.value, 0);
    for (let i = 0; i < items.length && total > 0;) {
      const side = Math.min(w, h), scale = (w * h) / total;
      let group = [], sum = 0, worst = Infinity;
      while (i + group.length < items.length) {
        const next = items[i + group.length];
        const area = (sum + next.value) * scale;
        const shapes = [...group, next].map(item => {
          const a = item.value * scale, long = (a * side) / area, short = area / side;
          return Math.max(long / short, short / long);
        });
        if (Math.max(...shapes) > worst) break;
        worst = Math.max(...shapes); group.push(next); sum += next.value;
      }
      const thick = (sum * scale) / side;
      let along = 0;
      for (const item of group) {
        const long = (item.value * scale) / thick;
        out.push(w >= h ? { item, x, y: y + along, w: thick, h: long } : { item, x: x + along, y, w: long, h: thick });
        along += long;
      }
      if (w >= h) { x += thick; w -= thick; } else { y += thick; h -= thick; }
      total -= sum; i += group.length;
    }
    return out;
  }
  // The end of a path says more than its beginning: as many of its last keys as fit.
  function shortened(names, whole, width) {
    if (whole.length * 6.6 <= width) return whole;
    for (let from = 0; from < names.length; from++) {
      const text = names.slice(from).join("");
      if (text.length * 6.6 <= width) return text;
    }
    return names.length ? names[names.length - 1].replace(/^\['|'\]$/g, "") : whole;
  }
  const shade = shades => `var(${Object.entries(shades).reduce((a, b) => (b[1] > a[1] ? b : a), ["--empty", -1])[0]})`;

  // The tree cut into at most so many tiles: the largest part is opened first, and what is small stays together.
  const MOST_TILES = 160;
  function parts() {
    const done = [];
    let open = [{ node: root, names: [] }];
    while (open.length) {
      open.sort((a, b) => b.node.bytes - a.node.bytes);
      const { node, names } = open.shift();
      const room = MOST_TILES - done.length - open.length;
      if (!node.children.size || room < 8) { done.push(tileOf(node, names)); continue; }
      const children = [...node.children.values()].sort((a, b) => b.bytes - a.bytes);
      if (node.row) done.push(tileOf({ ...node.row, row: node.row, leaves: node.row.times, largest: node.row, shades: { [node.row.shade]: 1 } }, names));
      open.push(...children.slice(0, room).map(child => ({ node: child, names: [...names, child.name] })));
      const rest = children.slice(room);
      if (rest.length) done.push({ names, rest: rest.length, value: rest.reduce((sum, child) => sum + child.bytes, 0), colour: "var(--empty)" });
    }
    return done;
  }
  const tileOf = (node, names) => ({ names, row: node.largest, leaves: node.leaves, value: node.bytes, colour: shade(node.shades) });

  const tiles = el("div", { class: "tiles" });
  function drawTiles() {
    const items = parts().filter(item => item.value > 0).sort((a, b) => b.value - a.value);
    const width = tiles.clientWidth || 1200;
    tiles.replaceChildren(...squarify(items, { x: 0, y: 0, w: width, h: 190 }).map(({ item, x, y, w, h }) => {
      const name = item.names.join("") + (item.rest ? ` ${item.rest} smaller` : item.row.times < item.leaves ? ` ${item.leaves} leaves` : "") || "(the array)";
      const label = w > 40 && h > 20 ? [el("b", {}, shortened(item.names, name, w - 12)), h > 36 ? bytes(item.value) : null] : [];
      const style = `${label.length ? "" : "padding:0;"}left:${x}px;top:${y}px;width:${w}px;height:${h}px;background:${item.colour}`;
      const act = item.row ? keyed(() => choose(item.row, true)) : {};
      const tile = el("div", { class: "tile", style, title: `${name}\n${bytes(item.value)} on each device`, ...act }, label);
      if (item.row && item.row.times === item.leaves) tile.dataset.row = item.row.number;
      return tile;
    }));
    mark();
  }
  function map() {
    const kinds = [["--one", "one copy in all"], ["--some", "split, with copies"], ["--all", "whole on every device"]];
    const legend = el("div", { class: "legend" }, kinds.map(([c, text]) => el("span", {}, el("i", { style: `background:var(${c})` }), text)));
    return el("div", { class: "card map" }, el("div", { class: "head" }, el("h2", {}, "What fills the memory of a device"), legend), tiles);
  }

  // ---- the table

  function layoutTags(kind, layout) {
    if (!layout.some(names => names.length)) return [el("span", { class: "soft" }, "whole")];
    const last = layout.reduce((found, names, d) => (names.length ? d : found), -1);
    return layout.slice(0, last + 1).map(names =>
      el("span", { class: "dim" }, names.length ? names.map(i => axisTag(axes[i])) : "·"));
  }
  function sizeCell(n) {
    const part = root.bytes ? (100 * n) / root.bytes : 0;
    return el("div", { class: "size", title: `${part.toFixed(1)} % of a device's bytes` },
      el("div", { class: "fill" }, el("i", { style: `width:${part}%` })), bytes(n));
  }
  function line(name, node, depth) {
    const row = node.row, folder = node.children.size > 0;
    const times = row ? row.times : node.leaves;
    const many = times > 1 ? el("span", { class: "times" }, ` ${times} leaves`) : null;
    const title = el("div", { class: "name mono", style: `padding-left:${depth * 16}px`, title: row ? row.path : name },
      el("span", { class: "arrow" }, folder ? "›" : ""), name || "(the array)", many);
    const item = el("div", { class: "line", ...keyed(() => (folder ? toggle(item) : choose(row))) }, title,
      el("div", { class: "type mono" }, row ? row.kind[TYPE] : ""),
      el("div", { class: "layout" }, row ? layoutTags(row.kind, row.kind[REST]) : null),
      sizeCell(node.bytes));
    item.node = node; item.depth = depth;
    if (folder) item.setAttribute("aria-expanded", "false");
    if (row) item.dataset.row = row.number;
    return item;
  }
  function insert(after, entries, depth, from) {
    const items = entries.slice(from, from + MOST_CHILDREN).map(({ name, node }) => line(name, node, depth));
    const left = entries.length - from - items.length;
    if (left > 0) {
      const more = el("div", { class: "line more", ...keyed(() => { insert(more, entries, depth, from + MOST_CHILDREN); more.remove(); }) },
        el("div", { style: `padding-left:${depth * 16 + 16}px` }, `show ${Math.min(left, MOST_CHILDREN)} of ${left} more`));
      more.depth = depth;
      items.push(more);
    }
    after.after(...items);
    mark();
    return items;
  }
  function toggle(item, open = !item.classList.contains("open")) {
    if (open === item.classList.contains("open")) return;
    item.classList.toggle("open", open);
    item.setAttribute("aria-expanded", String(open));
    if (open) { insert(item, lines(item.node), item.depth + 1, 0); return; }
    while (item.nextElementSibling && item.nextElementSibling.depth > item.depth) item.nextElementSibling.remove();
  }

  const top = el("div", { class: "line titles" }, ["leaf", "type", "split over, dim by dim", "on each device"].map(s => el("div", {}, s)));
  const body = el("div", {}, top);
  function fillTree() {
    while (top.nextElementSibling) top.nextElementSibling.remove();
    let items = insert(top, root.row ? [{ name: "", node: { ...root, children: new Map() } }] : lines(root), 0, 0);
    for (let shown = items.length; items.length && shown < 24;) {  // open level by level while it stays short
      const next = [];
      for (const item of items) {
        if (!item.node || !item.node.children.size || shown + item.node.children.size > 44) continue;
        toggle(item, true);
        for (let below = item.nextElementSibling; below && below.depth > item.depth; below = below.nextElementSibling) { next.push(below); shown++; }
      }
      items = next;
    }
  }
  function filter(text) {
    if (!text) return fillTree();
    while (top.nextElementSibling) top.nextElementSibling.remove();
    const found = rows.filter(row => row.path.toLowerCase().includes(text.toLowerCase()));
    insert(top, found.map(row => ({ name: row.path, node: { row, bytes: row.bytes, leaves: row.times, children: new Map() } })), 0, 0);
  }
  function tree() {
    const input = el("input", { type: "search", placeholder: "Find a leaf", "aria-label": "Find a leaf", oninput: e => filter(e.target.value.trim()) });
    body.addEventListener("keydown", e => {
      const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[e.key];
      const target = step && e.target.closest(".line")?.[step];
      if (target && target.tabIndex === 0) { e.preventDefault(); target.focus(); }
    });
    return el("div", { class: "card tree" }, el("div", { class: "top" }, el("h2", {}, "Leaves"), input), body);
  }

  // ---- the chosen leaf

  const panel = el("div", { class: "card leaf" });
  let chosen = null, inUse = false;

  function choose(row, scroll) {
    chosen = row; inUse = false;
    draw(); mark();
    if (scroll) body.querySelector(".line.on")?.scrollIntoView({ block: "nearest" });
  }
  function mark() {
    for (const node of document.querySelectorAll("[data-row]")) {
      node.classList.toggle("on", chosen !== null && +node.dataset.row === chosen.number);
    }
  }

  function draw() {
    const { kind, times } = chosen;
    const layout = inUse ? kind[USE] : kind[REST];
    const pieces = split(layout), shape = piece(kind[SHAPE], layout);
    const each = bytes(product(shape) * kind[ITEM]), copies = Math.round(devices / pieces);
    const text = pieces === 1
      ? `Whole on each of ${plural(devices, "device")}: ${each} on each.`
      : `${pieces} pieces of [${shape.join(", ")}], ${each} on each device` + (copies > 1 ? `; ${copies} devices hold each piece.` : "; no piece is there twice.");
    const caption = el("div", { class: "caption" });
    const pick = kind[USE] ? el("div", { class: "pick" }, [[false, "at rest"], [true, "in use"]].map(([value, name]) =>
      el("button", { class: value === inUse ? "on" : null, onclick: () => { inUse = value; draw(); } }, name))) : null;
    const facts = [["layout", el("span", { class: "mono" }, kind[SPEC])]];
    if (kind[USE]) facts.push(["in use", el("span", { class: "mono" }, kind[USE_SPEC])]);
    if (kind[MEMORY]) facts.push(["memory", kind[MEMORY]]);
    if (kind[WHY]) facts.push(["why", kind[WHY]]);
    for (const lost of kind[GIVEN_UP]) facts.push(["gave up", lost]);
    panel.replaceChildren(
      el("div", { class: "path mono" }, chosen.path),
      el("div", { class: "soft mono" }, kind[TYPE], times > 1 ? `, ${times} leaves alike` : ""),
      ...[pick, el("p", {}, text)].filter(Boolean),
      el("h2", {}, "The array, cut into pieces"), arrayPicture(kind, layout, caption),
      el("h2", { style: "margin-top:14px" }, "The devices, coloured by the piece they hold"), meshPicture(kind, layout, caption),
      caption, el("dl", {}, facts.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])));
    tell(kind, layout, caption, 0, false);
  }

  function tell(kind, layout, caption, device, light) {
    const at = coordinates(device), number = numbers(layout, at);
    const where = axes.map((axis, i) => [i ? ", " : "", axisTag(axis, `${axis.name} ${at[i]}`)]);
    caption.replaceChildren(`Device ${device} (`, ...where.flat(), `) holds `, el("span", { class: "mono" }, slices(kind[SHAPE], layout, number)));
    if (!light) return;
    const key = number.join();
    for (const node of panel.querySelectorAll(".piece")) node.classList.toggle("on", node.dataset.key === key);
  }

  function arrayPicture(kind, layout, caption) {
    const shape = kind[SHAPE], dims = layout.map((names, d) => d).filter(d => layout[d].length);
    const free = shape.map((n, d) => d).filter(d => !layout[d].length).sort((a, b) => shape[b] - shape[a]);
    const drawn = [...dims.slice(0, 2), ...free].slice(0, Math.min(2, shape.length)).sort((a, b) => a - b);
    const [rowDim, colDim] = drawn.length === 2 ? drawn : [undefined, drawn[0]];
    const cuts = d => (d === undefined ? 1 : Math.min(cut(layout[d]), 64));
    const nr = cuts(rowDim), nc = cuts(colDim), left = 96, width = 396, w = width - left;
    const tall = rowDim === undefined ? 34 : Math.max(90, Math.min(150, (w * shape[rowDim]) / Math.max(1, shape[colDim])));
    const box = el("svg", { class: "picture", viewBox: `0 0 ${width} ${tall + 20}`, role: "img", "aria-label": "pieces of the array" });
    const label = (d, x, y, anchor) => {
      const text = el("text", { x, y, "text-anchor": anchor }, `dim ${d}: ${shape[d]}`);
      return [text, layout[d].length ? el("text", { x, y: y + 14, "text-anchor": anchor, style: `fill:${axes[layout[d][0]].colour};font-weight:600` }, layout[d].map(i => axes[i].name).join(" × ")) : null];
    };
    const across = d => `dim ${d}: ${shape[d]}` + (layout[d].length ? ` over ${layout[d].map(i => axes[i].name).join(" × ")}` : "");
    for (let r = 0; r < nr; r++) for (let c = 0; c < nc; c++) {
      const number = layout.map(() => 0);
      if (rowDim !== undefined) number[rowDim] = Math.floor((r * cut(layout[rowDim])) / nr);  // of very many, a sample
      if (colDim !== undefined) number[colDim] = Math.floor((c * cut(layout[colDim])) / nc);
      const key = number.join(), device = owner(layout, number);
      box.append(el("rect", { class: "piece", x: left + (c * w) / nc, y: 18 + (r * tall) / nr, width: w / nc, height: tall / nr, rx: 2, fill: colour(layout, number), "data-key": key, onmouseenter: () => tell(kind, layout, caption, device, true) }));
    }
    if (colDim !== undefined) box.append(el("text", { x: left, y: 12, style: layout[colDim].length ? `fill:${axes[layout[colDim][0]].colour};font-weight:600` : null }, across(colDim)));
    if (rowDim !== undefined) box.append(...label(rowDim, 0, 18 + tall / 2 - 4, "start").filter(Boolean));
    const hidden = shape.map((n, d) => d).filter(d => d !== rowDim && d !== colDim);
    if (!hidden.length) return box;
    const words = hidden.map(d => across(d)).join("; ");
    return el("div", {}, box, el("div", { class: "soft", style: "font-size:12.5px" }, `Not drawn: ${words}.`));
  }
  // The first device that holds a piece.
  function owner(layout, number) {
    const at = axes.map(() => 0);
    layout.forEach((names, d) => {
      let n = number[d];
      for (let j = names.length - 1; j >= 0; j--) { at[names[j]] = n % axes[names[j]].size; n = Math.floor(n / axes[names[j]].size); }
    });
    return axes.reduce((device, axis, i) => device * axis.size + at[i], 0);
  }

  // Columns are the last axis, rows the one before it; further axes are blocks, side by side and below each other.
  function meshPicture(kind, layout, caption) {
    const k = axes.length, size = i => (i >= 0 ? axes[i].size : 1);
    const cols = size(k - 1), rowsN = size(k - 2);
    const wide = Math.min(size(k - 3), 8), deep = Math.min(axes.slice(0, Math.max(0, k - 3)).reduce((n, a) => n * a.size, 1), 4);
    const shownCols = Math.min(cols, 32), shownRows = Math.min(rowsN, 32);
    const width = 396, left = 0, gap = 14;
    const block = (width - left - gap * (wide - 1)) / wide;
    const cellW = block / shownCols, cellH = Math.max(8, Math.min(24, cellW, 260 / (shownRows * deep)));
    const topSpace = k >= 3 ? 34 : 18, tall = topSpace + cellH * shownRows + (k > 3 ? 14 : 0);
    const box = el("svg", { class: "picture", viewBox: `0 0 ${width} ${tall * deep + 4}`, role: "img", "aria-label": "devices of the mesh" });
    const named = (i, x, y, text, more = {}) => el("text", { x, y, style: `fill:${axes[i].colour};font-weight:600`, ...more }, text ?? axes[i].name);
    const label = cellW >= 20 && cellH >= 12, roomy = block >= 84;
    for (let deeper = 0; deeper < deep; deeper++) for (let b = 0; b < wide; b++) {
      const x0 = left + b * (block + gap), y0 = deeper * tall + topSpace;
      if (k >= 3) box.append(named(k - 3, x0, y0 - 20, `${axes[k - 3].name} ${b}`));
      if (k > 3 && b === 0) box.append(el("text", { x: width, y: y0 - 20, "text-anchor": "end" }, axes.slice(0, k - 3).map((a, i) => `${a.name} ${coordinates(deeper * product(axes.slice(k - 3).map(z => z.size)))[i]}`).join(", ")));
      if (roomy && k >= 2) box.append(named(k - 2, x0, y0 - 5, `${axes[k - 2].name} ↓`));
      if (roomy) box.append(named(k - 1, x0 + (k >= 2 ? block : 0), y0 - 5, `${axes[k - 1].name} →`, { "text-anchor": k >= 2 ? "end" : "start" }));
      for (let r = 0; r < shownRows; r++) for (let c = 0; c < shownCols; c++) {
        const device = ((deeper * size(k - 3) + b) * rowsN + r) * cols + c;
        const number = numbers(layout, coordinates(device));
        const x = x0 + c * cellW, y = y0 + r * cellH;
        box.append(el("rect", { class: "piece", x, y, width: cellW, height: cellH, rx: 2, fill: colour(layout, number), "data-key": number.join(), onmouseenter: () => tell(kind, layout, caption, device, true) }));
        if (label) box.append(el("text", { class: "no", x: x + cellW / 2, y: y + cellH / 2 }, device));
      }
    }
    const drawn = wide * deep * shownCols * shownRows;
    const words = (roomy ? "" : `Down: ${axes[k - 2].name}, across: ${axes[k - 1].name}. `) + (drawn < devices ? `${drawn} of ${devices} devices drawn.` : "");
    return words ? el("div", {}, box, el("div", { class: "soft", style: "font-size:12.5px" }, words)) : box;
  }

  // ---- all of it

  app.replaceChildren(...head(), issues(), map(), el("div", { class: "main" }, tree(), panel),
    el("footer", {}, "“On each device” is the layout at rest. Numbers in [a..b] are layers that lie alike; their bytes are added up. Devices are numbered in mesh order."));
  fillTree();
  drawTiles();
  addEventListener("resize", drawTiles);
  const asked = decodeURIComponent(location.hash.slice(1));  // plan.html#.layers[0..79].mlp.up
  if (rows.length) choose(rows.find(row => row.path === asked) ?? rows.reduce((a, b) => (b.bytes > a.bytes ? b : a)));
  else panel.append("This plan has no leaves.");
})();
