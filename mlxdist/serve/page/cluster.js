// The cluster as /cluster has it, refreshed while the page is visible. It goes on where the server has gone, and comes
// back with it.

import { make } from "./markdown.js";
import { request, ServerError } from "./server.js";

const EVERY_MS = 2000;
const RATE_SECONDS = 10; // over which a speed is a mean

const STATES = {
  ok: ["good", "up"],
  straggler: ["warn", "straggler"],
  silent: ["warn", "does not respond"],
  down: ["warn", "down"],
  failed: ["bad", "failed"],
};

const element = (id) => document.getElementById(id);
const samples = []; // [seconds, tokens generated], the last ones
let last = null; // what /cluster had last

// `askForKey` is called, and awaited, where the server does not accept the key.
export async function watchCluster(askForKey) {
  for (;;) {
    if (!document.hidden) {
      try {
        last = await (await request("/cluster")).json();
        show(last, "");
      } catch (error) {
        if (error.status === 401) await askForKey();
        else if (error instanceof ServerError) show(last, error.message);
        else if (error instanceof TypeError) show(last, "the server does not answer");
        else throw error;
      }
    }
    await pause();
  }
}

function pause() {
  return new Promise((resolve) => {
    const end = () => {
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", end);
      resolve();
    };
    const timer = setTimeout(end, EVERY_MS);
    if (document.hidden) {
      clearTimeout(timer);
      document.addEventListener("visibilitychange", end);
    }
  });
}

// Shows a view; with a `problem`, in which the server has no newer one, all ranks of the last one are down.
function show(view, problem) {
  const isDown = Boolean(problem) || !view?.is_ready;
  const reason = problem || view?.reason || "";
  setState(isDown ? "bad" : "good", isDown ? reason || "down" : headline(view));
  element("reason").textContent = reason ? `${reason[0].toUpperCase()}${reason.slice(1)}.` : "";
  element("reason").hidden = !reason;
  if (!view) return;
  showTotals(view, isDown);
  const findings = [...view.findings, ...view.warnings, ...view.notes];
  showList("findings", isDown ? [] : findings.map((text) => make("li", text)));
  const ranks = problem ? view.ranks.map((rank) => ({ ...rank, state: "down" })) : view.ranks;
  showList("ranks", ranks.map(rankItem));
}

function setState(state, text) {
  const place = element("state");
  place.dataset.state = state;
  if (place.textContent !== text) place.textContent = text; // it is read out
}

function headline({ model, ranks }) {
  const number = ranks.length === 1 ? "1 rank" : `${ranks.length} ranks`;
  return model ? `${model}, ${number}` : number;
}

function showList(id, items) {
  element(id).replaceChildren(...items);
  element(id).hidden = !items.length;
}

function showTotals({ time, job, model, layout, requests }, isDown) {
  const rows = [];
  if (requests && !isDown) {
    const rate = rateAt(time, requests.generated_tokens);
    const { prompt_tokens: prompt, cached_prompt_tokens: cached } = requests;
    rows.push(["Tokens per second", rate === null ? "-" : rate.toFixed(rate < 10 ? 1 : 0)]);
    rows.push(["Running", `${requests.running}`], ["Waiting", `${requests.queued}`]);
    rows.push(["Prefix cache hits", prompt ? `${Math.round((100 * cached) / prompt)} %` : "-"]);
    rows.push(["Restarts", `${requests.restarts}`]);
  }
  if (model) rows.push(["Model", model, "small"]);
  if (layout) rows.push(["Layout", layout, "small"]);
  if (job) rows.push(["Job", job, "small"]);
  element("totals").replaceChildren(
    ...rows.map(([name, value, className]) => {
      const row = make("div", undefined, className);
      row.append(make("dt", name), make("dd", value));
      return row;
    }),
  );
}

function rateAt(time, tokens) {
  if (samples.length && (tokens < samples.at(-1)[1] || time < samples.at(-1)[0])) samples.length = 0; // restarted
  samples.push([time, tokens]);
  while (samples.length > 2 && samples[1][0] <= time - RATE_SECONDS) samples.shift();
  const [since, before] = samples[0];
  return time > since ? (tokens - before) / (time - since) : null;
}

function rankItem(rank) {
  const item = make("li");
  const [color, words] = STATES[rank.state];
  item.dataset.state = color;
  item.dataset.rank = rank.rank;
  const head = make("div", undefined, "head");
  const badge = make("span", words, "badge");
  badge.dataset.state = color;
  head.append(make("span", `Rank ${rank.rank}${rank.host ? `, ${rank.host}` : ""}`), badge);
  const facts = make("dl");
  for (const [name, value] of factsOf(rank)) {
    const cell = make("dd", value);
    if (name === "Memory" && rank.memory_limit) cell.append(bar(rank.memory / rank.memory_limit));
    facts.append(make("dt", name), cell);
  }
  item.append(head, facts);
  return item;
}

function factsOf(rank) {
  const facts = [];
  if (rank.held) facts.push(["Holds", `${rank.held.layers}, ${size(rank.held.bytes)}, ${percent(rank.held.share)}`]);
  if (rank.memory !== null) {
    facts.push(["Memory", size(rank.memory) + (rank.memory_limit ? ` of ${size(rank.memory_limit)}` : "")]);
  }
  if (rank.mlx_memory) {
    facts.push(["MLX memory", `${size(rank.mlx_memory.active)}, ${size(rank.mlx_memory.peak)} at its peak`]);
  }
  if (rank.step !== null) facts.push(["Step", rank.total_steps === null ? `${rank.step}` : `${rank.step} of ${rank.total_steps}`]);
  if (rank.bubble !== null) facts.push(["Bubble", percent(rank.bubble)]);
  if (rank.operation) {
    const place = rank.call_site ? ` at ${rank.call_site}` : "";
    facts.push(["Operation", `${rank.in_operation ? "" : "after "}${rank.operation}${place}, ${rank.elapsed.toFixed(1)} s`]);
  }
  if (rank.waiting_on !== null) facts.push(["Waits for", `rank ${rank.waiting_on}`]);
  if (rank.gbps !== null) facts.push(["Links", `${rank.gbps.toFixed(2)} GB/s sent and received`]);
  if (rank.pid !== null) facts.push(["Process", `${rank.pid}`]);
  return facts;
}

function percent(part) {
  return `${Math.round(100 * part)} %`;
}

function size(bytes) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let value = bytes;
  while (value >= 1000 && units.length > 1) {
    value /= 1000;
    units.shift();
  }
  return `${value.toFixed(value < 10 && units[0] !== "B" ? 1 : 0)} ${units[0]}`;
}

function bar(part) {
  const frame = make("div", undefined, "bar");
  const filled = make("div");
  filled.style.width = percent(Math.min(part, 1)).replace(" ", "");
  frame.append(filled);
  return frame;
}
