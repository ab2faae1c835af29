// Requests to the server that this page has come from. The key is in the storage that the user has chosen.

const KEY = "mlxdist.key";

export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export function key() {
  return sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "";
}

export function setKey(text, isKept) {
  forgetKey();
  (isKept ? localStorage : sessionStorage).setItem(KEY, text);
}

export function forgetKey() {
  sessionStorage.removeItem(KEY);
  localStorage.removeItem(KEY);
}

// The response to a GET, or to a POST of `body` as JSON. Throws ServerError for a status that is none of success.
export async function request(path, body, signal) {
  const headers = {};
  if (key()) headers["Authorization"] = `Bearer ${key()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const response = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    body: body === undefined ? undefined : JSON.stringify(body),
    headers,
    signal,
    cache: "no-store",
  });
  if (!response.ok) throw new ServerError(await reason(response), response.status);
  return response;
}

async function reason(response) {
  try {
    const message = (await response.json()).error.message;
    if (typeof message === "string") return message;
  } catch (error) {
    if (!(error instanceof SyntaxError || error instanceof TypeError)) throw error;
  }
  return `the server has answered with status ${response.status}`;
}

// Yields the objects of a stream of server-sent events. Throws ServerError if it ends before its end.
export async function* stream(path, body, signal) {
  const response = await request(path, { ...body, stream: true }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ServerError("the connection has ended before the answer", 0);
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const event = JSON.parse(line.slice("data: ".length));
      if (event.error) throw new ServerError(String(event.error.message), 0);
      yield event;
    }
  }
}
