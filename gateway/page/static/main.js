// The page: watches the load and shows it. Everything that comes from outside goes into text nodes, never into markup.

import { call } from "/calls.js";
import { offerModels, startChat } from "/chat.js";
import { blocks, lines, number, seconds } from "/draw.js";

const at = (id) => document.getElementById(id);
const PLACES = 120; // snapshots that a line has
const WATCH = { interval_s: 1, max_requests: 100, max_block_cells: 1024 };
const CONDITIONS = ["", "registered", "ready", "draining", "lost"];
const PHASES = ["", "preparing", "queued", "prefill", "decode", "paused"];
const LEGEND = ["free", "cached", "active", "shared"];
const HOST_LEGEND = ["free", "evicted prefixes", "swapped out", "in copy"];
const HOST_CLASSES = ["host-free", "host-cached", "host-swapped", "host-copying"];
const SILENT_MS = 3500; // after which a stream that says nothing counts as broken
let apiKey = "";
let last = null;

const history = { input: [], output: [], first: [[], []], gap: [[], []], queue: [[], []], blocks: [[], []], running: [],
  waiting: [] };
const CHARTS = [
  { title: "Throughput", names: ["out", "in"], series: () => [history.output, history.input], write: (v) => `${number(v)} tok/s` },
  { title: "Time to first token", names: ["p50", "p95"], series: () => history.first, write: seconds },
  { title: "Between tokens", names: ["p50", "p95"], series: () => history.gap, write: seconds },
  { title: "Requests", names: ["running", "waiting"], series: () => [history.running, history.waiting], write: number },
  { title: "KV blocks in use", names: ["active", "cached"], series: () => history.blocks, write: (v) => `${number(v)} %`, top: 100 },
  { title: "Time in the queue", names: ["p50", "p95"], series: () => history.queue, write: seconds },
];

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function push(values, value) {
  values.push(value);
  if (values.length > PLACES) values.shift();
}

function sumOf(models, name) {
  return models.reduce((before, { blocks: each = {} }) => before + (each[name] ?? 0), 0);
}

function remember({ total = {}, models = [] }) {
  const share = (name) => (100 * sumOf(models, name)) / (sumOf(models, "num_blocks") || 1);
  push(history.blocks[0], share("num_active"));
  push(history.blocks[1], share("num_cached"));
  push(history.output, total.generation_tokens_per_s ?? 0);
  push(history.input, total.prompt_tokens_per_s ?? 0);
  push(history.running, total.num_running ?? 0);
  push(history.waiting, (total.num_waiting ?? 0) + (total.num_preparing ?? 0));
  const measured = [[history.first, "time_to_first_token_s"], [history.gap, "inter_token_s"], [history.queue, "queue_s"]];
  for (const [rows, name] of measured) {
    push(rows[0], total[name] ? (total[name].p50 ?? 0) : null);
    push(rows[1], total[name] ? (total[name].p95 ?? 0) : null);
  }
}

// ------------------------------------------------------------ what is shown

function showTiles({ total = {}, models = [], workers = [] }) {
  const here = workers.filter(({ condition }) => condition !== 4);
  const used = (100 * sumOf(models, "num_active")) / (sumOf(models, "num_blocks") || 1);
  const percentile = (found) => (found ? seconds(found.p50 ?? 0) : "–");
  const rows = [
    [number(total.generation_tokens_per_s ?? 0), "tok/s", "generated"],
    [number(total.prompt_tokens_per_s ?? 0), "tok/s", "prompts"],
    [total.num_running ?? 0, "", "running"],
    [(total.num_waiting ?? 0) + (total.num_preparing ?? 0), "", "waiting"],
    [percentile(total.time_to_first_token_s), "", "first token, p50"],
    [percentile(total.inter_token_s), "", "token gap, p50"],
    [used.toFixed(used < 10 ? 1 : 0), "%", "KV blocks in use"],
    [here.length, "", here.length === 1 ? "worker" : "workers"],
  ];
  at("tiles").replaceChildren(...rows.map(([value, unit, label]) => {
    const tile = element("div", "tile"), big = element("b", "", String(value));
    if (unit) big.append(" ", element("small", "", unit));
    tile.append(big, element("span", "", label));
    return tile;
  }));
}

function makeCharts() {
  at("charts").replaceChildren(...CHARTS.map((chart) => {
    const place = element("div", "chart"), head = element("header"), keys = element("p", "keys");
    chart.keys = chart.names.map((name) => element("span", "", name));
    chart.canvas = element("canvas");
    chart.canvas.setAttribute("role", "img");
    keys.append(...chart.keys);
    head.append(element("h3", "", chart.title), keys);
    place.append(head, chart.canvas);
    return place;
  }));
  at("legend").replaceChildren(...LEGEND.map((name) => element("span", name, name)));
  at("host-legend").append(...HOST_LEGEND.map((name, index) => element("span", HOST_CLASSES[index], name)));
}

function showCharts() {
  for (const { canvas, keys, names, series, title, write, top } of CHARTS) {
    const rows = series(), now = rows.map((values) => values.at(-1) ?? null);
    const texts = names.map((name, index) => `${name} ${now[index] === null ? "–" : write(now[index])}`);
    keys.forEach((key, index) => { key.textContent = texts[index]; });
    canvas.setAttribute("aria-label", `${title}: ${texts.join(", ")}`);
    lines(canvas, rows, { places: PLACES, write, top });
  }
}

const cards = new Map();

function workerCard(id) {
  if (!cards.has(id)) {
    const card = element("article", "worker"), head = element("header");
    const parts = { card, title: element("h3", "", id), badge: element("span", "badge"), canvas: element("canvas"),
      counts: element("p"), rates: element("p"), tier: element("div", "tier"), hostCounts: element("p"),
      hostCanvas: element("canvas") };
    parts.title.title = id;
    for (const each of [parts.canvas, parts.hostCanvas]) each.setAttribute("role", "img");
    parts.tier.hidden = true;
    parts.tier.append(parts.hostCanvas, parts.hostCounts);
    head.append(parts.title, parts.badge);
    card.append(head, parts.canvas, parts.counts, parts.rates, parts.tier);
    cards.set(id, parts);
  }
  return cards.get(id);
}

// The second tier, where the worker has one. Counts and map are of one moment, and come together or not at all.
function showTier(parts, id, { num_blocks, num_cached, num_swapped, num_copying }) {
  const held = `${whole(num_blocks)} blocks in host memory: ${whole(num_cached)} of evicted prefixes, ` +
    `${whole(num_swapped)} swapped out, ${whole(num_copying)} in copy`;
  parts.hostCounts.textContent = held;
  parts.hostCanvas.setAttribute("aria-label", `Host memory of ${id}: ${held}`);
}

function showWorkers({ workers = [], models = [] }) {
  const rows = workers.toSorted((a, b) => (a.worker_id < b.worker_id ? -1 : 1)).map((worker) => {
    const parts = workerCard(worker.worker_id), condition = CONDITIONS[worker.condition] ?? "", kv = worker.blocks ?? {};
    parts.card.dataset.condition = condition;
    parts.badge.className = `badge ${condition}`;
    parts.badge.textContent = condition === "lost" ? `lost ${seconds(worker.age_s ?? 0)} ago` : condition;
    const held = `${whole(kv.num_active)} of ${whole(kv.num_blocks)} blocks in use, ${whole(kv.num_cached)} cached`;
    const name = models.length > 1 ? `${worker.model}; ` : "";
    parts.counts.textContent = `${name}${worker.num_running ?? 0} running, ${worker.num_waiting ?? 0} waiting` +
      `${worker.num_paused ? `, ${worker.num_paused} paused` : ""}; ${held}`;
    parts.rates.textContent = condition === "lost" ? "its requests go on elsewhere where they can" :
      `${number(worker.generation_tokens_per_s ?? 0)} tok/s out, ${number(worker.prefill_tokens_per_s ?? 0)} in, ` +
      `${number(worker.steps_per_s ?? 0)} steps/s` +
      `${Number(worker.num_preemptions ?? 0) ? `, ${worker.num_preemptions} preemptions` : ""}`;
    parts.canvas.setAttribute("aria-label", `Block map of ${worker.worker_id}: ${held}`);
    if (worker.block_map) {
      parts.map = worker.block_map;
      parts.hostMap = worker.host_block_map;
      parts.tier.hidden = !parts.hostMap;
      if (parts.hostMap) showTier(parts, worker.worker_id, worker.host_blocks ?? {});
    }
    return parts;
  });
  for (const [id, parts] of cards) if (!rows.includes(parts)) cards.delete(id);
  const shown = [...at("workers").children], wanted = rows.map(({ card }) => card);
  if (shown.length !== wanted.length || shown.some((card, index) => card !== wanted[index])) at("workers").replaceChildren(...wanted);
  at("host-legend").hidden = !rows.some(({ hostMap }) => hostMap);
  for (const { canvas, map, hostCanvas, hostMap } of rows) {
    if (map) blocks(canvas, map, "device");
    if (hostMap) blocks(hostCanvas, hostMap, "host");
  }
}

function table(id, rows) {
  at(id).tBodies[0].replaceChildren(...rows.map((cells) => {
    const row = element("tr");
    row.append(...cells.map((cell) => {
      if (cell instanceof Node) {
        const place = element("td");
        place.append(cell);
        return place;
      }
      const [text, className] = Array.isArray(cell) ? cell : [cell, ""];
      const place = element("td", className, text);
      if (!className) place.title = text;
      return place;
    }));
    return row;
  }));
}

const whole = (value) => Number(value ?? 0).toLocaleString("en");
const count = (value) => [whole(value), "n"];

function showTables({ requests = [], tenants = [], gateways = [], unreachable_gateways: silent = [], total = {} }) {
  const in_flight = total.num_in_flight ?? 0;
  at("num-requests").textContent = in_flight > requests.length ? `${in_flight}, the oldest ${requests.length}` : String(in_flight);
  document.querySelector("#requests + .empty").hidden = requests.length > 0;
  at("requests").classList.toggle("without-tenants", !requests.some(({ tenant }) => tenant));
  table("requests", requests.map((each) => [
    each.request_id ?? "",
    element("span", `badge ${PHASES[each.phase] ?? ""}`, PHASES[each.phase] ?? ""),
    count(each.num_prompt_tokens), count(each.num_output_tokens), [each.num_blocks === undefined ? "–" : String(each.num_blocks), "n"],
    [seconds(each.age_s ?? 0), "n"], each.tenant ?? "", each.model ?? "", each.worker_id ?? "", each.gateway ?? "",
  ]));
  at("tenants-section").hidden = !tenants.length;
  table("tenants", tenants.map(({ tenant = "", figures = {} }) => [
    tenant, count(figures.num_in_flight), count(figures.num_running), count((figures.num_waiting ?? 0) + (figures.num_preparing ?? 0)),
    [number(figures.prompt_tokens_per_s ?? 0), "n"], [number(figures.generation_tokens_per_s ?? 0), "n"],
  ]));
  table("gateways", [
    ...gateways.map((each) => [each.gateway ?? "", each.is_draining ? "draining" : "serving", count(each.num_in_flight),
      [number(each.generation_tokens_per_s ?? 0), "n"]]),
    ...silent.map((name) => [name, "does not answer", ["–", "n"], ["–", "n"]]),
  ]);
}

function show(snapshot) {
  last = snapshot;
  const names = (snapshot.models ?? []).map(({ model }) => model);
  at("service").textContent = names.length ? `${names.join(", ")}, seen by ${snapshot.gateway ?? "the gateway"}` : "no model yet";
  offerModels(names);
  showTiles(snapshot);
  showWorkers(snapshot);
  showTables(snapshot);
  showCharts();
}

// ------------------------------------------------------------ the stream

function status(state, text, notice = "") {
  at("status").dataset.state = state;
  at("status").textContent = text;
  at("notice").hidden = !notice;
  at("notice").textContent = notice;
}

async function watch() {
  const stopping = new AbortController();
  let silence = 0;
  const heard = () => {
    clearTimeout(silence);
    silence = setTimeout(() => stopping.abort(), SILENT_MS);
  };
  heard();
  try {
    for await (const snapshot of call("/octavo.v1.LoadService/WatchLoad", WATCH, { key: apiKey, signal: stopping.signal })) {
      heard();
      remember(snapshot);
      show(snapshot);
      if (snapshot.is_draining) status("wait", "draining");
      else status("live", "live");
    }
  } finally {
    clearTimeout(silence);
  }
}

async function watchForever() {
  for (;;) {
    try {
      await watch();
    } catch (error) {
      if (error.status === 401 || error.status === 403) {
        status("down", "locked", apiKey ? error.message : "");
        at("key-form").hidden = false;
        at("key").focus();
        await new Promise((resolve) => { entered = resolve; });
        continue;
      }
      const known = error.reason === "DRAINING" || !error.message || error.name === "TypeError" || error.name === "AbortError";
      status("down", error.reason === "DRAINING" ? "stopped" : "no answer", known ? "" : error.message);
    }
    await new Promise((resolve) => { setTimeout(resolve, 1000); });
  }
}

let entered = () => {};
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  apiKey = at("key").value.trim();
  entered();
});
makeCharts();
startChat(() => apiKey);
new ResizeObserver(() => { if (last) { showCharts(); showWorkers(last); } }).observe(document.body);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (last) show(last); });
watchForever();
