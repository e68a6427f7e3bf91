// The chat box: a conversation that streams from the service, and the receipt of its last answer as a timeline.

import { call } from "/calls.js";
import { seconds } from "/draw.js";

const at = (id) => document.getElementById(id);
const USER = 2, ASSISTANT = 3; // octavo.v1.ChatRole
const MAX_TOKENS = 1024;
let conversation = [];
let running = null;

function turn(kind, text) {
  const place = document.createElement("div");
  place.className = `turn ${kind}`;
  place.textContent = text;
  at("turns").append(place);
  at("turns").scrollTop = at("turns").scrollHeight;
  return place;
}

function timeline({ usage = {}, receipt = {} }) {
  const { queue_s = 0, prefill_s = 0, decode_s = 0, gateway_s = 0, total_s = 0 } = receipt;
  const parts = [["gateway", "gateway", gateway_s], ["queue", "queue", queue_s], ["prefill", "prefill-time", prefill_s],
    ["decode", "decode-time", decode_s]];
  const bar = document.createElement("div"), times = document.createElement("div");
  bar.className = "bar";
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", parts.map(([name, , value]) => `${name} ${seconds(value)}`).join(", "));
  times.className = "times";
  for (const [name, style, value] of parts) {
    const piece = document.createElement("i"), label = document.createElement("span"), key = document.createElement("i");
    piece.className = key.className = style;
    piece.style.flexGrow = String(Math.max(value, 0) * 1000);
    bar.append(piece);
    label.append(key, `${name} ${seconds(value)}`);
    times.append(label);
  }
  const tokens = usage.completion_tokens ?? 0, cached = usage.cached_tokens ?? 0;
  const sum = document.createElement("span");
  const rate = decode_s > 0 && tokens > 1 ? `, ${((tokens - 1) / decode_s).toFixed(0)} tokens/s` : "";
  sum.textContent = `${usage.prompt_tokens ?? 0} tokens in (${cached} cached), ${tokens} out${rate}, ` +
    `first after ${seconds(receipt.time_to_first_token_s ?? 0)}, ${seconds(total_s)} in all, by ${receipt.worker_id ?? "?"}`;
  times.append(sum);
  at("receipt").replaceChildren(bar, times);
}

async function ask(key) {
  const text = at("prompt").value.trim();
  if (!text || running) return;
  at("prompt").value = "";
  at("receipt").replaceChildren();
  conversation.push({ role: USER, content: text });
  turn("user", text);
  const place = turn("assistant", ""), stopping = new AbortController();
  running = stopping;
  at("send").disabled = true;
  at("stop").hidden = false;
  let answer = "";
  const request = { model: at("model").value, chat: { messages: conversation }, stop: { max_tokens: MAX_TOKENS } };
  try {
    for await (const message of call("/octavo.v1.InferenceService/Generate", request, { key: key(), signal: stopping.signal })) {
      if (message.delta?.text) {
        answer += message.delta.text;
        place.textContent = answer;
        at("turns").scrollTop = at("turns").scrollHeight;
      }
      if (message.finished) timeline(message.finished);
    }
  } catch (error) {
    if (!stopping.signal.aborted) turn("failed", error.message);
  }
  if (answer) conversation.push({ role: ASSISTANT, content: answer });
  else {
    conversation.pop();
    place.remove();
  }
  running = null;
  at("send").disabled = false;
  at("stop").hidden = true;
}

export function startChat(key) {
  at("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    ask(key);
  });
  at("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      at("chat-form").requestSubmit();
    }
  });
  at("stop").addEventListener("click", () => running?.abort());
  at("clear").addEventListener("click", () => {
    running?.abort();
    conversation = [];
    at("turns").replaceChildren();
    at("receipt").replaceChildren();
    at("prompt").focus();
  });
}

export function offerModels(names) {
  const select = at("model"), had = [...select.options].map((option) => option.value);
  at("model-field").hidden = names.length < 2;
  if (had.join("\n") === names.join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => new Option(name, name)));
  if (names.includes(chosen)) select.value = chosen;
}
