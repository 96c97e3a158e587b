"use strict";
// Draws the graph of a model, and links it with the layer tables. Names of nodes and layers are
// untrusted, so they are set as text only.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const MAX_UNFOLDED = 300; // nodes of the first drawing, and of one group; more are folded
  const MAX_SCOPES = 50; // depth of the groups, which some functions here descend by recursion
  const MAX_TEXT = 26; // characters in a node
  const HEATS = 6; // colours, from little to much
  const LEAST_ERROR_EXPONENT = -4; // own errors of 1e-4 and less have the lightest colour
  const MAX_ERROR = 10; // as in the tables: from here on there is nothing left to compare
  const SORT_KEYS = {
    time: "seconds",
    share: "seconds",
    "of roofline": "roofline",
    FLOPs: "flops",
    "bytes moved": "bytes",
    "own error": "error",
  };

  function make(tag, parent, attributes = {}, text = "") {
    const made = document.createElement(tag);
    return finish(made, parent, attributes, text);
  }

  function draw(tag, parent, attributes = {}, text = "") {
    return finish(document.createElementNS(SVG, tag), parent, attributes, text);
  }

  function finish(made, parent, attributes, text) {
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text) made.textContent = text;
    parent.append(made);
    return made;
  }

  function threeDigits(value) {
    return value >= 99.95 ? value.toFixed(0) : value >= 9.995 ? value.toFixed(1) : value.toFixed(2);
  }

  function timeText(seconds) {
    if (seconds >= 1) return `${threeDigits(seconds)} s`;
    if (seconds >= 1e-3) return `${threeDigits(seconds * 1e3)} ms`;
    return `${threeDigits(seconds * 1e6)} us`;
  }

  // A number with a decimal prefix: 231 MFLOP, 1.20 kB.
  function amountText(amount, unit) {
    const prefixes = ["", "k", "M", "G", "T"];
    while (amount >= 999.5 && prefixes.length > 1) {
      amount /= 1000;
      prefixes.shift();
    }
    return `${prefixes.length === 5 ? amount.toFixed(0) : threeDigits(amount)} ${prefixes[0]}${unit}`;
  }

  function percentText(share) {
    return `${(100 * share).toFixed(share < 0.995 ? 1 : 0)} %`;
  }

  function shortened(text) {
    return text.length > MAX_TEXT ? `…${text.slice(1 - MAX_TEXT)}` : text;
  }

  // -- folding ---------------------------------------------------------------

  // An item is a leaf {name, nodes: [index]} or a group {name, nodes, items}; both know their parent.

  function folded(nodes, layers) {
    const leaves = nodes.map(([name], index) => ({ name, nodes: [index] }));
    const root = { name: "", items: leaves };
    if (nodes.length > MAX_UNFOLDED) {
      root.items = byScope(nodes, leaves);
      limit(root, layers);
    }
    adopt(root);
    return root;
  }

  function byScope(nodes, leaves) {
    const root = { items: [], scopes: new Map() };
    for (const leaf of leaves) {
      let group = root;
      for (const scope of scopesOf(nodes[leaf.nodes[0]])) {
        if (!group.scopes.has(scope)) {
          const made = { name: group.name ? `${group.name}/${scope}` : scope, items: [], scopes: new Map() };
          group.scopes.set(scope, made);
          group.items.push(made);
        }
        group = group.scopes.get(scope);
      }
      group.items.push(leaf);
    }
    return root.items.map(withoutSingles);
  }

  function scopesOf([name, operator]) {
    if (operator === "input" || operator === "output") return [];
    return name.split("/").filter(Boolean).slice(0, -1).slice(0, MAX_SCOPES);
  }

  function withoutSingles(item) {
    if (!item.items) return item;
    item.items = item.items.map(withoutSingles);
    return item.items.length === 1 ? item.items[0] : item;
  }

  // Groups with too many items: nodes of one layer are put together, then neighbours.
  function limit(group, layers) {
    if (group.items.length > MAX_UNFOLDED) group.items = byLayer(group.items, layers);
    if (group.items.length > MAX_UNFOLDED) group.items = byOrder(group.items);
    for (const item of group.items) if (item.items) limit(item, layers);
  }

  function byLayer(items, layers) {
    const layerOf = new Map();
    for (const layer of layers) for (const node of layer.nodes) layerOf.set(node, layer);
    const groups = new Map();
    for (const item of items) {
      const layer = item.items ? undefined : layerOf.get(item.nodes[0]);
      const key = layer ?? item;
      if (!groups.has(key)) groups.set(key, { name: layer ? layer.name : "", items: [] });
      groups.get(key).items.push(item);
    }
    return [...groups.values()].map(withoutSingles);
  }

  function byOrder(items) {
    const size = Math.ceil(Math.sqrt(items.length));
    const starts = items.map((_, index) => index).filter((index) => index % size === 0);
    return starts.map((start) => ({ name: `${items[start].name} …`, items: items.slice(start, start + size) }));
  }

  function adopt(group) {
    group.nodes = [];
    for (const item of group.items) {
      item.parent = group;
      if (item.items) adopt(item);
      for (const node of item.nodes) group.nodes.push(node);
    }
  }

  function groupsIn(group) {
    const found = group.items.filter((item) => item.items);
    for (const inner of found) found.push(...inner.items.filter((item) => item.items));
    return found; // by depth
  }

  // -- the layer tables ------------------------------------------------------

  function linkTable(engine, choose) {
    const table = document.getElementById(engine.table);
    if (!table) return [];
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const layerOf = new Map(rows.map((row, index) => [row, engine.layers[index]]));
    table.classList.add("linked");
    [...table.tHead.rows[0].cells].forEach((head, column) => makeSortable(head, column, body, layerOf));
    rows.forEach((row, index) => {
      row.tabIndex = index ? -1 : 0;
      row.addEventListener("click", () => choose(engine, layerOf.get(row)));
    });
    body.addEventListener("keydown", (event) => {
      const row = event.target.closest("tr");
      const next = { ArrowDown: row.nextElementSibling, ArrowUp: row.previousElementSibling }[event.key];
      if (next) {
        row.tabIndex = -1;
        next.tabIndex = 0;
        next.focus();
      } else if (event.key === "Enter" || event.key === " ") choose(engine, layerOf.get(row));
      else return;
      event.preventDefault();
    });
    return rows;
  }

  function makeSortable(head, column, body, layerOf) {
    const title = head.textContent;
    head.textContent = "";
    const key = SORT_KEYS[title];
    const valueOf = (row) => (key ? layerOf.get(row)[key] ?? -1 : row.cells[column].textContent);
    make("button", head, { type: "button" }, title).addEventListener("click", () => {
      const before = head.getAttribute("aria-sort");
      const descends = before ? before === "ascending" : Boolean(key);
      for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", descends ? "descending" : "ascending");
      const ordered = [...body.rows].sort((a, b) => {
        const [one, two] = [valueOf(a), valueOf(b)];
        const order = key ? one - two : one.localeCompare(two, undefined, { numeric: true });
        return descends ? -order : order;
      });
      body.append(...ordered);
    });
  }

  function showRow(row) {
    const details = row.closest("details");
    if (details) details.open = true;
    const box = row.closest(".scroll");
    const offset = row.getBoundingClientRect().top - box.getBoundingClientRect().top;
    if (offset < 40 || offset > box.clientHeight - 40) box.scrollTop += offset - box.clientHeight / 2;
  }

  // -- the page --------------------------------------------------------------

  function start(container) {
    const data = JSON.parse(container.querySelector('script[type="application/json"]').textContent);
    const { nodes, works, engines } = data;
    let engine = engines[0] ?? { label: "", layers: [], errors: [] };
    let coloured = "seconds";
    let chosen = new Set(); // indices of nodes
    let matches = new Set(); // indices of nodes that the search finds
    let shown = [];
    let width = 0; // of the drawing, px
    let itemOf = new Map(); // of each node's index
    let current; // the item that Tab reaches
    let heat; // {layersOf, errorOf, total} of the engine
    const valueOf = { seconds: secondsOf, roofline: rooflineOf, error: errorOf };
    const view = { x: 0, y: 0, scale: 1 };
    const rows = new Map(engines.map((each) => [each, linkTable(each, chooseLayer)]));
    if (!nodes.length) return;

    const root = folded(nodes, engine.layers);
    const groups = groupsIn(root);
    const open = new Set(); // groups that are unfolded
    // All groups of a level are unfolded, or none.
    let level = root.items.filter((item) => item.items);
    let count = root.items.length;
    while (level.length) {
      count += level.reduce((sum, group) => sum + group.items.length - 1, 0);
      if (count > MAX_UNFOLDED) break;
      level.forEach((group) => open.add(group));
      level = level.flatMap((group) => group.items.filter((item) => item.items));
    }

    container.textContent = "";
    const bar = make("div", container, { class: "graph-bar" });
    const engineChoice = addChoice(
      "Engine",
      engines.map((each, index) => [index, each.label]),
      (value) => showEngine(engines[value]),
    );
    const colourChoice = addChoice(
      "Colour",
      [["seconds", "time"], ["roofline", "share of roofline"], ["error", "own error"]],
      (value) => {
        coloured = value;
        paint();
      },
    );
    const search = make("input", make("label", bar, {}, "Search "), { type: "search", placeholder: "node or operator" });
    const buttons = make("span", bar);
    addButton("+", "Zoom in", () => zoom(1.3));
    addButton("−", "Zoom out", () => zoom(1 / 1.3));
    addButton("Fit", "Fit the whole graph", fit);
    if (groups.length) {
      addButton("Unfold all", "Unfold all groups", () => unfoldAll(groups));
      addButton("Fold all", "Fold all groups", () => unfoldAll([]));
    }
    const legend = make("span", bar, { class: "graph-legend" });
    const box = make("div", container, { class: "graph-box" });
    const svg = draw("svg", box, { role: "group", "aria-label": "Graph of the model. The layer tables hold the same in text." });
    const stage = draw("g", svg);
    const detail = make("div", container, { class: "graph-detail", "aria-live": "polite" });

    search.addEventListener("input", find);
    search.addEventListener("keydown", (event) => event.key === "Enter" && nextMatch());
    listenForPointer();
    svg.addEventListener("keydown", onKey);
    showEngine(engine);
    layOut();
    fitWidth();
    describe();

    function addChoice(label, options, onChange) {
      const select = make("select", make("label", bar, {}, `${label} `));
      for (const [value, text] of options) make("option", select, { value }, text);
      select.addEventListener("change", () => onChange(select.value));
      if (!engines.length) select.parentElement.hidden = true;
      return select;
    }

    function addButton(text, label, onClick) {
      make("button", buttons, { type: "button", "aria-label": label, title: label }, text).addEventListener("click", onClick);
    }

    // -- drawing

    function layOut() {
      shown = [];
      (function collect(group) {
        for (const item of group.items) if (item.items && open.has(item)) collect(item); else shown.push(item);
      })(root);
      itemOf = new Map(shown.flatMap((item) => item.nodes.map((node) => [node, item])));
      shown.forEach((item, index) => {
        item.index = index;
        item.lines = linesOf(item);
        item.width = 22 + 6.7 * Math.max(...item.lines.map((line) => line.length));
        item.before = new Set();
        item.after = new Set();
      });
      nodes.forEach(([, , reads], index) => {
        for (const read of reads) {
          const [from, to] = [itemOf.get(read), itemOf.get(index)];
          if (from === to) continue;
          from.after.add(to);
          to.before.add(from);
        }
      });
      const edges = shown.flatMap((item) => [...item.after].map((to) => [item.index, to.index]));
      const { x, y, lines, width: whole } = layeredLayout(shown.map((item) => item.width), edges);
      width = whole;
      stage.textContent = "";
      for (const line of lines) if (line) draw("path", stage, { d: line });
      shown.forEach((item, index) => drawItem(item, { x: x[index], y: y[index] }));
      if (!shown.includes(current)) [current] = shown;
      current.mark.setAttribute("tabindex", 0);
      paint();
    }

    function linesOf(item) {
      const [name, operator] = nodes[item.nodes[0]];
      if (item.items) return [shortened(item.name), `${item.nodes.length} nodes`];
      if (operator === "input" || operator === "output") return [shortened(name), operator];
      return [shortened(operator), shortened(name)];
    }

    function drawItem(item, { x, y }) {
      Object.assign(item, { x, y });
      item.mark = draw("g", stage, { class: "node", role: "button", tabindex: -1, transform: `translate(${x} ${y})` });
      item.tip = draw("title", item.mark);
      const isEnd = !item.items && ["input", "output"].includes(nodes[item.nodes[0]][1]);
      draw("rect", item.mark, { x: -item.width / 2, y: -18, width: item.width, height: 36, rx: isEnd ? 18 : 5 });
      draw("text", item.mark, { y: -3 }, item.lines[0]);
      draw("text", item.mark, { y: 11 }, item.lines[1]);
      item.mark.addEventListener("click", () => activate(item));
    }

    function showEngine(shownEngine) {
      engine = shownEngine;
      engineChoice.value = engines.indexOf(engine);
      const layersOf = new Map();
      for (const layer of engine.layers) {
        for (const node of layer.nodes) layersOf.set(node, [...(layersOf.get(node) ?? []), layer]);
      }
      const total = engine.layers.reduce((sum, layer) => sum + (layer.seconds ?? 0), 0);
      heat = { layersOf, errorOf: new Map(engine.errors), total };
      const [, roofline, error] = colourChoice.options;
      roofline.disabled = engine.layers.every((layer) => layer.roofline === null);
      error.disabled = !engine.errors.length;
      if (colourChoice.selectedOptions[0].disabled) colourChoice.value = coloured = "seconds";
      if (shown.length) paint();
    }

    function layersOf(item) {
      return new Set(item.nodes.flatMap((node) => heat.layersOf.get(node) ?? []));
    }

    function secondsOf(item) {
      const timed = [...layersOf(item)].filter((layer) => layer.seconds !== null);
      return timed.length ? timed.reduce((sum, layer) => sum + layer.seconds, 0) : undefined;
    }

    // The layers of an item whose roofline is known: their share of it together.
    function rooflineOf(item) {
      const known = [...layersOf(item)].filter((layer) => layer.roofline !== null);
      const sum = (key) => known.reduce((total, layer) => total + layer[key], 0);
      return known.length ? sum("least") / sum("seconds") : undefined;
    }

    function errorOf(item) {
      const errors = item.nodes.map((node) => heat.errorOf.get(node)).filter((error) => error !== undefined);
      return errors.length ? Math.max(...errors) : undefined;
    }

    function paint() {
      const values = shown.map(valueOf[coloured]);
      const most = values.reduce((a, b) => Math.max(a, b ?? 0), 0);
      shown.forEach((item, index) => {
        const classes = ["node", item.items ? "group" : "leaf"];
        if (values[index] !== undefined) classes.push(`heat-${heatOf(values[index], most)}`);
        if (item.nodes.some((node) => chosen.has(node))) classes.push("chosen");
        if (item.nodes.some((node) => matches.has(node))) classes.push("match");
        item.mark.setAttribute("class", classes.join(" "));
        item.tip.textContent = item.items ? item.name : nodes[item.nodes[0]][0];
        item.mark.setAttribute("aria-label", textOf(item));
      });
      paintLegend(most);
    }

    function heatOf(value, most) {
      const parts = {
        seconds: value / (most || 1),
        roofline: value,
        error: 1 - Math.log10(Math.max(value, 10 ** LEAST_ERROR_EXPONENT)) / LEAST_ERROR_EXPONENT,
      };
      const part = parts[coloured];
      return Math.min(Math.max(Math.ceil(part * HEATS), 1), HEATS);
    }

    function paintLegend(most) {
      legend.textContent = "";
      if (!most) return;
      const ends = {
        seconds: ["0", timeText(most)],
        roofline: ["0 %", "100 %"],
        error: [10 ** LEAST_ERROR_EXPONENT, 1],
      };
      const [least, highest] = ends[coloured];
      legend.append(`${least} `);
      for (let index = 1; index <= HEATS; index += 1) make("i", legend, { class: `heat-${index}` });
      legend.append(` ${highest}`);
    }

    function textOf(item) {
      const [name, operator] = nodes[item.nodes[0]];
      const parts = item.items ? [item.name, `${item.nodes.length} nodes, folded`] : [operator, name];
      const seconds = secondsOf(item);
      const error = errorOf(item);
      const held = [...layersOf(item)];
      if (seconds !== undefined) {
        const share = `${((100 * seconds) / (heat.total || 1)).toFixed(1)} % of the time`;
        const fused = held.length === 1 && held[0].nodes.length > 1 ? ` in a layer of ${held[0].nodes.length} nodes` : "";
        parts.push(`${timeText(seconds)}, ${share}${fused}`);
        parts.push(rooflineText(held, rooflineOf(item)));
      }
      const work = item.items ? null : works[item.nodes[0]];
      if (work) {
        const flops = work[0] === null ? "FLOPs not known" : amountText(work[0], "FLOP");
        parts.push(`by itself ${flops} and ${amountText(work[1], "B")}`);
      }
      if (error !== undefined) parts.push(`own error ${error < MAX_ERROR ? error.toPrecision(2) : "so large that all is lost"}`);
      return parts.join(", ");
    }

    function rooflineText(held, share) {
      const limit = held.length === 1 ? ` (${held[0].limit})` : "";
      return share === undefined ? `share of its roofline not known${limit}` : `${percentText(share)} of its roofline${limit}`;
    }

    // -- selection

    function activate(item) {
      setCurrent(item);
      if (item.items) unfold(item);
      else chooseNodes(item.nodes, item);
    }

    function chooseNodes(indices, item) {
      chosen = new Set(indices);
      markRows();
      paint();
      describe(item);
    }

    function chooseLayer(ofEngine, layer) {
      chosen = new Set(layer.nodes);
      if (nodes.length) {
        showEngine(ofEngine);
        const item = itemOf.get(layer.nodes[0]);
        if (item) centre(item);
        paint();
        describe(item, layer);
      }
      markRows(layer);
    }

    // The rows of the layers that hold the chosen nodes, in the table of the engine.
    function markRows(only) {
      for (const [each, ofEngine] of rows) {
        ofEngine.forEach((row, index) => {
          const layer = each.layers[index];
          const isChosen = only ? layer === only : each === engine && layer.nodes.some((node) => chosen.has(node));
          row.classList.toggle("chosen", isChosen);
          if (isChosen && !only) showRow(row);
        });
      }
    }

    function describe(item, layer) {
      detail.textContent = "";
      if (layer && !layer.nodes.some((node) => itemOf.has(node))) {
        detail.textContent = `The layer ${layer.name} holds no node of this graph.`;
      } else if (item) {
        make("span", detail, {}, textOf(item));
        for (let group = item.parent; group !== root; group = group.parent) {
          const inner = group;
          make("button", detail, { type: "button" }, `Fold ${shortened(inner.name)}`).addEventListener("click", () => fold(inner));
          detail.insertBefore(document.createTextNode(" "), detail.lastChild);
        }
      } else {
        detail.textContent =
          "Data flows downwards. Drag to move; Ctrl and the wheel, two fingers, or + and −, zoom. Arrow keys move along the edges," +
          " Enter selects a node or unfolds a group, Backspace folds it again.";
      }
    }

    function setCurrent(item) {
      current.mark?.setAttribute("tabindex", -1);
      current = item;
      item.mark.setAttribute("tabindex", 0);
    }

    function focus(item) {
      setCurrent(item);
      item.mark.focus({ preventScroll: true });
      if (!isVisible(item)) centre(item);
    }

    function unfold(group) {
      open.add(group);
      layOut();
      const first = shown.find((item) => group.nodes.includes(item.nodes[0]));
      centre(first);
      focus(first);
      describe(first);
    }

    function fold(group) {
      for (const inner of [group, ...groupsIn(group)]) open.delete(inner);
      layOut();
      centre(group);
      focus(group);
      describe(group);
    }

    function unfoldAll(wanted) {
      open.clear();
      for (const group of wanted) open.add(group);
      layOut();
      fitWidth();
      describe();
    }

    // -- search

    function find() {
      const text = search.value.trim().toLowerCase();
      matches = new Set();
      if (text) nodes.forEach(([name, operator], index) => {
        if (name.toLowerCase().includes(text) || operator.toLowerCase().includes(text)) matches.add(index);
      });
      paint();
      describe();
      if (text) detail.textContent = `${matches.size} of ${nodes.length} nodes match. Enter goes to the next one.`;
    }

    function nextMatch() {
      if (!matches.size) return;
      const last = chosen.size === 1 ? Math.max(...chosen) : -1;
      const node = [...matches].find((index) => index > last) ?? [...matches][0];
      let group = itemOf.get(node);
      if (group.items) {
        while (group.items) {
          open.add(group);
          group = group.items.find((item) => item.nodes.includes(node));
        }
        layOut();
      }
      const item = itemOf.get(node);
      setCurrent(item);
      centre(item);
      chooseNodes([node], item);
    }

    // -- moving and zooming

    function apply() {
      stage.setAttribute("transform", `translate(${view.x} ${view.y}) scale(${view.scale})`);
    }

    function extent() {
      const bottom = shown.reduce((most, item) => Math.max(most, item.y + 18), 0);
      return { width, height: bottom + 12 };
    }

    function fit() {
      const { width, height } = extent();
      view.scale = Math.min(svg.clientWidth / width, svg.clientHeight / height, 1);
      view.x = (svg.clientWidth - width * view.scale) / 2;
      view.y = 0;
      apply();
    }

    // From the top, as large as the width allows, but readable.
    function fitWidth() {
      view.scale = Math.max(Math.min(svg.clientWidth / extent().width, 1), 0.6);
      const room = svg.clientWidth - extent().width * view.scale;
      const toFirst = svg.clientWidth / 2 - shown[0].x * view.scale;
      view.x = room > 0 ? room / 2 : Math.min(Math.max(toFirst, room), 0);
      view.y = 0;
      apply();
    }

    function centre(item) {
      view.x = svg.clientWidth / 2 - item.x * view.scale;
      view.y = svg.clientHeight / 2 - item.y * view.scale;
      apply();
    }

    function isVisible(item) {
      const [x, y] = [view.x + item.x * view.scale, view.y + item.y * view.scale];
      return x > 0 && y > 0 && x < svg.clientWidth && y < svg.clientHeight;
    }

    function zoom(factor, x = svg.clientWidth / 2, y = svg.clientHeight / 2) {
      const scale = Math.min(Math.max(view.scale * factor, 0.02), 4);
      view.x = x - ((x - view.x) * scale) / view.scale;
      view.y = y - ((y - view.y) * scale) / view.scale;
      view.scale = scale;
      apply();
    }

    function drag(x, y) {
      view.x += x;
      view.y += y;
      apply();
    }

    // One of two fingers moves, the other rests. What is between them stays between them.
    function pinch(last, now, other) {
      const distance = ({ x, y }) => Math.max(Math.hypot(x - other.x, y - other.y), 1);
      const bounds = svg.getBoundingClientRect();
      drag((now.x - last.x) / 2, (now.y - last.y) / 2);
      const [x, y] = [(now.x + other.x) / 2 - bounds.left, (now.y + other.y) / 2 - bounds.top];
      zoom(distance(now) / distance(last), x, y);
    }

    function listenForPointer() {
      const pointers = new Map(); // {x, y} of each that is down
      let moved = false;
      svg.addEventListener("pointerdown", (event) => {
        moved = pointers.size > 0; // two fingers are no click
        pointers.set(event.pointerId, { x: event.clientX, y: event.clientY });
        if (moved) for (const id of pointers.keys()) svg.setPointerCapture(id);
      });
      svg.addEventListener("pointermove", (event) => {
        const last = pointers.get(event.pointerId);
        if (!last || !event.buttons) return;
        const now = { x: event.clientX, y: event.clientY };
        if (!moved && Math.hypot(now.x - last.x, now.y - last.y) < 5) return;
        if (!moved) svg.setPointerCapture(event.pointerId);
        moved = true;
        svg.classList.add("dragged");
        const others = [...pointers].filter(([id]) => id !== event.pointerId);
        pointers.set(event.pointerId, now);
        if (others.length) pinch(last, now, others[0][1]);
        else drag(now.x - last.x, now.y - last.y);
      });
      for (const end of ["pointerup", "pointercancel"]) {
        svg.addEventListener(end, (event) => {
          pointers.delete(event.pointerId);
          if (!pointers.size) svg.classList.remove("dragged");
        });
      }
      svg.addEventListener(
        "click",
        (event) => {
          if (moved) event.stopPropagation(); // the end of a drag is no click
          moved = false;
        },
        true,
      );
      svg.addEventListener(
        "wheel",
        (event) => {
          if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
          event.preventDefault();
          const bounds = svg.getBoundingClientRect();
          zoom(Math.exp(-event.deltaY / 300), event.clientX - bounds.left, event.clientY - bounds.top);
        },
        { passive: false },
      );
    }

    function onKey(event) {
      if (event.ctrlKey || event.altKey || event.metaKey) return;
      const nearest = (items) => [...items].sort((a, b) => Math.abs(a.x - current.x) - Math.abs(b.x - current.x))[0];
      const beside = (sign) => shown.filter((item) => Math.abs(item.y - current.y) < 30 && sign * (item.x - current.x) > 0);
      const actions = {
        ArrowDown: () => nearest(current.after),
        ArrowUp: () => nearest(current.before),
        ArrowRight: () => nearest(beside(1)),
        ArrowLeft: () => nearest(beside(-1)),
        Enter: () => activate(current),
        " ": () => activate(current),
        Backspace: () => current.parent !== root && fold(current.parent),
        Escape: () => chooseNodes([]),
        "+": () => zoom(1.3),
        "-": () => zoom(1 / 1.3),
      };
      if (!(event.key in actions)) return;
      event.preventDefault();
      const target = actions[event.key]();
      if (event.key.startsWith("Arrow") && target) focus(target);
    }
  }

  document.querySelectorAll(".model-graph").forEach(start);
})();
