"use strict";
// Places the nodes of a directed graph in ranks, with edges that go downwards (Sugiyama, Tagawa and
// Toda, 1981). The steps are those of Gansner et al., A Technique for Drawing Directed Graphs (1993),
// with cheaper ranks and positions: the time is about linear, and nothing recurses, so that a chain
// of thousands of nodes is laid out too.
const layeredLayout = (() => {
  const HEIGHT = 36; // of a node, px
  const STEP = 62; // from rank to rank
  const GAP = 18; // between nodes of a rank, or a node and a line
  const LINE_GAP = 8; // between two lines
  const MARGIN = 12;
  const MAX_VIRTUAL = 60_000; // points on lines; lines beyond are drawn behind the nodes
  const ROUNDS = 24; // of ordering at most
  const PATIENCE = 4; // rounds without an improvement
  const PASSES = 4; // of positioning, each upwards and downwards
  const STIFFNESS = 8; // of a line, compared with a node

  // Returns an order of all nodes that most edges follow: all, if there is no cycle.
  function topologicalOrder(after) {
    const state = new Uint8Array(after.length); // 0: not visited, 1: visited
    const finished = [];
    for (let start = 0; start < after.length; start += 1) {
      if (state[start]) continue;
      state[start] = 1;
      const stack = [[start, 0]];
      while (stack.length) {
        const top = stack[stack.length - 1];
        const next = after[top[0]][top[1]];
        top[1] += 1;
        if (next === undefined) finished.push(stack.pop()[0]);
        else if (!state[next]) {
          state[next] = 1;
          stack.push([next, 0]);
        }
      }
    }
    return finished.reverse();
  }

  // Returns {order, before, after} without cycles: an edge against the order is turned round.
  function acyclic(count, edges) {
    const raw = Array.from({ length: count }, () => []);
    for (const [from, to] of edges) raw[from].push(to);
    const order = topologicalOrder(raw);
    const place = new Int32Array(count);
    order.forEach((node, index) => (place[node] = index));
    const after = Array.from({ length: count }, () => new Set());
    for (const [from, to] of edges) {
      if (place[from] < place[to]) after[from].add(to);
      else after[to].add(from);
    }
    const before = Array.from({ length: count }, () => []);
    after.forEach((readers, node) => readers.forEach((reader) => before[reader].push(node)));
    return { order, before, after: after.map((readers) => [...readers]) };
  }

  // Longest paths from the sources. Then nodes move down to their readers where this makes no line
  // longer than the one that it makes shorter, so that side branches end up near their readers.
  function ranksOf({ order, before, after }) {
    const rank = new Int32Array(order.length);
    for (const node of order) for (const read of before[node]) rank[node] = Math.max(rank[node], rank[read] + 1);
    for (let index = order.length - 1; index >= 0; index -= 1) {
      const node = order[index];
      const lowest = after[node].reduce((least, reader) => Math.min(least, rank[reader] - 1), Infinity);
      if (lowest === Infinity || lowest === rank[node]) continue;
      const isLast = (read) => after[read].every((reader) => reader === node || rank[reader] < lowest);
      if (before[node].filter(isLast).length <= 1) rank[node] = lowest;
    }
    return rank;
  }

  // Returns the layout with a virtual node wherever a line passes a rank. All readers of a node
  // share one line, since they read the same tensor.
  function withVirtual({ after }, rank, widths) {
    const layers = Array.from({ length: 1 + rank.reduce((a, b) => Math.max(a, b), 0) }, () => []);
    const graph = { widths: [...widths], rank: [...rank], up: [], down: [], layers, owner: [], far: [] };
    const add = (id, ofRank, owner) => {
      graph.rank[id] = ofRank;
      graph.owner[id] = owner;
      [graph.up[id], graph.down[id]] = [[], []];
    };
    widths.forEach((_, node) => add(node, rank[node], node));
    const limit = longestLine(after, rank);
    after.forEach((readers, node) => {
      let end = node;
      const near = readers.filter((reader) => rank[reader] - rank[node] <= limit);
      for (const reader of near.sort((a, b) => rank[a] - rank[b])) {
        while (graph.rank[end] < rank[reader] - 1) {
          const id = graph.rank.length;
          add(id, graph.rank[end] + 1, node);
          graph.widths[id] = 0;
          link(graph, end, id);
          end = id;
        }
        link(graph, end, reader);
      }
      for (const reader of readers) if (rank[reader] - rank[node] > limit) graph.far.push([node, reader]);
    });
    return graph;
  }

  function link(graph, from, to) {
    graph.down[from].push(to);
    graph.up[to].push(from);
  }

  function longestLine(after, rank) {
    let limit = rank.length;
    for (;;) {
      let total = 0;
      after.forEach((readers, node) => {
        const spans = readers.map((reader) => rank[reader] - rank[node]).filter((span) => span <= limit);
        total += spans.reduce((most, span) => Math.max(most, span - 1), 0);
      });
      if (total <= MAX_VIRTUAL) return limit;
      limit = Math.floor(limit / 2);
    }
  }

  // -- the order within each rank ----------------------------------------------

  // Depth first, so that branches start side by side.
  function fillLayers(graph) {
    const seen = new Uint8Array(graph.rank.length);
    const starts = graph.up.map((_, id) => id).filter((id) => !graph.up[id].length);
    const stack = starts.reverse();
    while (stack.length) {
      const id = stack.pop();
      if (seen[id]) continue;
      seen[id] = 1;
      graph.layers[graph.rank[id]].push(id);
      for (let index = graph.down[id].length - 1; index >= 0; index -= 1) stack.push(graph.down[id][index]);
    }
  }

  function orderLayers(graph) {
    const place = new Float64Array(graph.rank.length);
    const number = (layer) => layer.forEach((id, index) => (place[id] = index));
    graph.layers.forEach(number);
    let best = graph.layers.map((layer) => [...layer]);
    let least = crossings(graph, place);
    let worse = 0;
    for (let round = 0; round < ROUNDS && least && worse < PATIENCE; round += 1) {
      const isDown = round % 2 === 0;
      const layers = isDown ? graph.layers : [...graph.layers].reverse();
      for (const layer of layers) sortByNeighbours(layer, isDown ? graph.up : graph.down, place);
      for (const layer of layers) number(layer);
      const found = crossings(graph, place);
      worse += 1;
      if (found < least) {
        [best, least, worse] = [graph.layers.map((layer) => [...layer]), found, 0];
      }
    }
    graph.layers = best;
  }

  function sortByNeighbours(layer, neighbours, place) {
    const wanted = new Map();
    layer.forEach((id, index) => {
      const beside = neighbours[id];
      wanted.set(id, beside.length ? beside.reduce((sum, other) => sum + place[other], 0) / beside.length : index);
    });
    layer.sort((a, b) => wanted.get(a) - wanted.get(b));
    layer.forEach((id, index) => (place[id] = index));
  }

  // Counts pairs of crossing edges between neighbouring ranks, with a Fenwick tree of their ends.
  function crossings(graph, place) {
    let count = 0;
    for (const layer of graph.layers.slice(0, -1)) {
      const ends = [];
      for (const id of layer) ends.push(...graph.down[id].map((below) => place[below]).sort((a, b) => a - b));
      const tree = new Int32Array(2 + ends.reduce((a, b) => Math.max(a, b), 0));
      ends.forEach((end, index) => {
        let left = 0;
        for (let at = end + 1; at > 0; at -= at & -at) left += tree[at];
        count += index - left;
        for (let at = end + 1; at < tree.length; at += at & -at) tree[at] += 1;
      });
    }
    return count;
  }

  // -- positions -----------------------------------------------------------------

  function positions(graph) {
    const { layers, up, down } = graph;
    const x = new Float64Array(graph.rank.length);
    for (const layer of layers) {
      const offsets = offsetsOf(graph, layer);
      const middle = offsets[offsets.length - 1] / 2;
      layer.forEach((id, index) => (x[id] = offsets[index] - middle));
    }
    const upwards = [...layers].reverse();
    for (let pass = 0; pass < PASSES; pass += 1) {
      for (const layer of upwards) positionLayer(graph, layer, (id) => (down[id].length ? down : up)[id], x);
      for (const layer of layers) positionLayer(graph, layer, (id) => (up[id].length ? up : down)[id], x);
    }
    for (const layer of layers) positionLayer(graph, layer, (id) => inChain(graph, id), x);
    return x;
  }

  // The start of a chain follows the chain, not the node at which it branches off: it is straight.
  function inChain({ up, down }, id) {
    const isOnly = (above, below) => down[above].length === 1 && up[below].length === 1;
    const endsChain = up[id].some((above) => isOnly(above, id));
    const startsChain = down[id].some((below) => isOnly(id, below));
    return !up[id].length || (startsChain && !endsChain) ? down[id] : up[id];
  }

  function offsetsOf(graph, layer) {
    const offsets = [0];
    for (let index = 1; index < layer.length; index += 1) {
      const [a, b] = [graph.widths[layer[index - 1]], graph.widths[layer[index]]];
      offsets.push(offsets[index - 1] + (a || b ? (a + b) / 2 + GAP : LINE_GAP));
    }
    return offsets;
  }

  function stiffness(graph, id) {
    return graph.widths[id] ? 1 : STIFFNESS;
  }

  // Moves the nodes of a rank as near to their neighbours as its order and the gaps allow: the least
  // sum of squares, by pooling adjacent violators.
  function positionLayer(graph, layer, neighboursOf, x) {
    const offsets = offsetsOf(graph, layer);
    const pools = []; // {sum, weight, count} of nodes that touch each other
    layer.forEach((id, index) => {
      let [sumBeside, weightBeside] = [0, 0];
      for (const other of neighboursOf(id)) {
        sumBeside += stiffness(graph, other) * x[other];
        weightBeside += stiffness(graph, other);
      }
      const wanted = weightBeside ? sumBeside / weightBeside : x[id];
      const weight = stiffness(graph, id);
      let pool = { sum: weight * (wanted - offsets[index]), weight, count: 1 };
      while (pools.length) {
        const last = pools[pools.length - 1];
        if (last.sum / last.weight <= pool.sum / pool.weight) break;
        pools.pop();
        pool = { sum: last.sum + pool.sum, weight: last.weight + pool.weight, count: last.count + pool.count };
      }
      pools.push(pool);
    });
    let index = 0;
    for (const { sum, weight, count } of pools) {
      for (let left = count; left; left -= 1, index += 1) x[layer[index]] = sum / weight + offsets[index];
    }
  }

  // -- lines -----------------------------------------------------------------------

  // Returns for each node the path of the line to its readers, which bends between ranks only.
  function linesOf(graph, x, y, count) {
    const paths = Array(count).fill("");
    const round = (value) => Math.round(value * 10) / 10;
    const half = HEIGHT / 2;
    const connect = (owner, from, to) => {
      const [startX, startY, endX, endY] = [x[from], y[from] + half, x[to], y[to] - half].map(round);
      const middle = round((startY + endY) / 2);
      const bend = startX === endX ? `V${endY}` : `C${startX} ${middle} ${endX} ${middle} ${endX} ${endY}`;
      const through = to < count ? "" : `v${HEIGHT}`;
      paths[owner] += `M${startX} ${startY}${bend}${through}`;
    };
    graph.down.forEach((below, id) => below.forEach((to) => connect(graph.owner[id], id, to)));
    for (const [from, to] of graph.far) connect(from, from, to);
    return paths;
  }

  // widths: of each node, px. edges: pairs of indices of different nodes. Returns the centres of the
  // nodes, the line from each node to all that read it, and the width of all.
  return (widths, edges) => {
    const ordered = acyclic(widths.length, edges);
    const graph = withVirtual(ordered, ranksOf(ordered), widths);
    fillLayers(graph);
    orderLayers(graph);
    const x = positions(graph);
    const leftmost = x.reduce((least, centre, id) => Math.min(least, centre - graph.widths[id] / 2), Infinity);
    for (let id = 0; id < x.length; id += 1) x[id] += MARGIN - leftmost;
    const y = graph.rank.map((rank) => MARGIN + HEIGHT / 2 + STEP * rank);
    const rightmost = x.reduce((most, centre, id) => Math.max(most, centre + graph.widths[id] / 2), 0);
    return { x, y, lines: linesOf(graph, x, y, widths.length), width: rightmost + MARGIN };
  };
})();
