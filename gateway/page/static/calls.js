// Calls of the gateway: a POST with JSON, answered by a stream of server-sent events. A key travels in a header, never in
// an address.

export class CallFailed extends Error {
  constructor(status, { code = "", reason = "", message = "" }) {
    super(message || `HTTP ${status}`);
    Object.assign(this, { status, code, reason });
  }
}

export async function* call(method, body, { key, signal }) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers["X-Api-Key"] = key;
  const response = await fetch(method, { method: "POST", headers, body: JSON.stringify(body), signal, cache: "no-store" });
  if (!response.ok) {
    const text = await response.text();
    let failure = { message: text.trim() };
    try { failure = JSON.parse(text); } catch { /* it was plain text */ }
    throw new CallFailed(response.status, failure);
  }
  for await (const { event, data } of events(response.body)) {
    if (event === "failure") throw new CallFailed(200, JSON.parse(data));
    if (event === "end") return;
    yield JSON.parse(data);
  }
  throw new CallFailed(200, { message: "the stream broke off" });
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const fields = { event: "message", data: "" };
      for (const line of part.split("\n")) {
        const at = line.indexOf(": ");
        if (at > 0) fields[line.slice(0, at)] = line.slice(at + 2);
      }
      yield fields;
    }
  }
}
