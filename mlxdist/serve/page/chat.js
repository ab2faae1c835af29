// Conversations with the model. Each is in this browser's storage under a key of its own, so that two tabs that have
// different ones open do not overwrite each other's.

import { make, render } from "./markdown.js";
import { request, ServerError, stream } from "./server.js";

const PREFIX = "mlxdist.chat.";
const MAX_TITLE = 60;
const SAVE_MS = 1000; // between two saves of an answer that grows

const element = (id) => document.getElementById(id);
const running = new Map(); // the AbortController of each conversation that has an answer under way
let conversations = [];
let current = null;

export function startChat() {
  conversations = load();
  open(conversations[0] ?? begin());
  element("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  element("text").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  element("talk").addEventListener("keydown", (event) => {
    if (event.key === "Escape") stop();
  });
  element("stop").addEventListener("click", stop);
  element("new").addEventListener("click", () => {
    open(begin());
    setList(false);
    element("text").focus();
  });
  element("toggle").addEventListener("click", () => setList(element("toggle").getAttribute("aria-expanded") !== "true"));
  addEventListener("pagehide", () => conversations.forEach(save));
  listModels();
}

// The models and adapters of the server; there is a choice only if there are several.
async function listModels() {
  const select = element("model");
  try {
    const { data } = await (await request("/v1/models")).json();
    select.replaceChildren(...data.map(({ id }) => new Option(id, id)));
    element("of-model").hidden = data.length < 2;
  } catch (error) {
    if (!(error instanceof ServerError || error instanceof TypeError)) throw error;
  }
}

function begin() {
  return { id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, updated: Date.now(), messages: [] };
}

function load() {
  const found = [];
  for (let place = 0; place < localStorage.length; place += 1) {
    const name = localStorage.key(place);
    if (name.startsWith(PREFIX)) {
      const conversation = parsed(localStorage.getItem(name));
      if (conversation) found.push({ ...conversation, id: name.slice(PREFIX.length) });
    }
  }
  return found.sort((one, other) => other.updated - one.updated);
}

function parsed(text) {
  try {
    const { updated, messages } = JSON.parse(text);
    const isMessage = ({ role, content }) => ["user", "assistant"].includes(role) && typeof content === "string";
    return Number.isFinite(updated) && messages.every(isMessage) ? { updated, messages } : null;
  } catch (error) {
    if (error instanceof SyntaxError || error instanceof TypeError) return null; // of another version
    throw error;
  }
}

function save(conversation) {
  if (!conversation.messages.length) return;
  const { updated, messages } = conversation;
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify({ updated, messages }));
    warn("");
  } catch (error) {
    if (error.name !== "QuotaExceededError") throw error;
    warn("This browser has no room for more: the last messages will not be here after a reload. Delete some chats.");
  }
}

function warn(text) {
  element("notice").textContent = text;
  element("notice").hidden = !text;
}

function titleOf({ messages }) {
  const [first] = messages;
  return first ? first.content.trim().split("\n")[0].slice(0, MAX_TITLE) || "Untitled" : "New chat";
}

function open(conversation) {
  current = conversation;
  showMessages();
  showList();
}

function showList() {
  const items = conversations.map((conversation) => {
    const item = make("li");
    const title = make("button", titleOf(conversation), "title");
    title.type = "button";
    if (conversation === current) title.setAttribute("aria-current", "true");
    title.addEventListener("click", () => {
      open(conversation);
      setList(false);
      element("text").focus();
    });
    const remove = button("Delete", () => {
      if (confirm(`Delete "${titleOf(conversation)}"?`)) forget(conversation);
    });
    remove.setAttribute("aria-label", `Delete ${titleOf(conversation)}`);
    item.append(title, remove);
    return item;
  });
  element("conversations").replaceChildren(...items);
}

function forget(conversation) {
  running.get(conversation.id)?.abort();
  localStorage.removeItem(PREFIX + conversation.id);
  conversations = conversations.filter((each) => each !== conversation);
  if (conversation === current) open(conversations[0] ?? begin());
  else showList();
  element("new").focus();
}

// On a narrow screen the list of conversations is shown on demand.
function setList(isShown) {
  element("toggle").setAttribute("aria-expanded", String(isShown));
}

function button(text, act, name) {
  const made = make("button", text);
  made.type = "button";
  if (name) made.setAttribute("aria-label", name);
  made.addEventListener("click", act);
  return made;
}

const views = new WeakMap(); // the elements of messages that are shown

function showMessages() {
  const list = element("messages");
  list.replaceChildren(...current.messages.map(messageItem));
  if (!current.messages.length) list.append(make("li", "What is asked here goes to the model that this server has.", "empty"));
  list.scrollTop = list.scrollHeight;
  showControls();
}

function showControls() {
  const isRunning = running.has(current.id);
  element("stop").hidden = !isRunning;
  element("send").hidden = isRunning;
  element("messages").setAttribute("aria-busy", String(isRunning));
  for (const each of element("messages").querySelectorAll(".row button")) each.disabled = isRunning;
}

function messageItem(message, number) {
  const item = make("li", undefined, message.role);
  const isUser = message.role === "user";
  item.append(make("h3", isUser ? "You" : "Model", "role"));
  const view = { item, content: make("div", undefined, "content"), row: make("div", undefined, "row") };
  if (!isUser) {
    view.thoughts = make("details", undefined, "thoughts");
    view.thoughts.append(make("summary", "Thoughts"), make("div"));
    view.end = make("p", undefined, "end");
    item.append(view.thoughts);
  }
  item.append(view.content, ...(view.end ? [view.end] : []), view.row);
  const place = `message ${number + 1}`;
  view.row.append(button("Copy", () => navigator.clipboard?.writeText(message.content), `Copy ${place}`));
  if (isUser) view.row.append(button("Edit", () => edit(message), `Edit ${place}`));
  else view.row.append(button("Regenerate", () => regenerate(message), `Regenerate ${place}`));
  views.set(message, view);
  showMessage(message);
  return item;
}

function showMessage(message) {
  const view = views.get(message);
  if (message.role === "user") {
    view.content.textContent = message.content;
    return;
  }
  render(view.content, message.content);
  view.thoughts.hidden = !message.reasoning;
  if (message.reasoning) render(view.thoughts.lastChild, message.reasoning);
  view.end.textContent = message.error ?? message.note ?? "";
  view.end.hidden = !view.end.textContent;
  view.end.classList.toggle("error", Boolean(message.error));
}

function send() {
  const field = element("text");
  const text = field.value.trim();
  if (!text || running.has(current.id)) return;
  field.value = "";
  current.messages.push({ role: "user", content: text });
  answer(current);
}

function edit(message) {
  const { content, row } = views.get(message);
  const field = make("textarea");
  field.value = message.content;
  field.rows = Math.min(10, message.content.split("\n").length + 1);
  field.setAttribute("aria-label", "Edited message");
  const cancel = () => {
    showMessages();
    views.get(message).row.querySelector("button:last-child").focus();
  };
  const accept = () => {
    const text = field.value.trim();
    if (!text) return;
    current.messages.splice(current.messages.indexOf(message), Infinity, { role: "user", content: text });
    answer(current);
    element("text").focus();
  };
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") cancel();
    else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) accept();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  content.replaceChildren(field);
  row.replaceChildren(button("Send", accept), button("Cancel", cancel));
  field.focus();
}

function regenerate(message) {
  current.messages.splice(current.messages.indexOf(message), Infinity);
  answer(current);
  element("text").focus();
}

function stop() {
  running.get(current.id)?.abort();
}

// What the model gets: answers without text are left out, and what the user has said around them is one message.
function historyOf({ messages }) {
  const found = [];
  for (const { role, content } of messages) {
    if (!content) continue;
    if (found.at(-1)?.role === role) found.at(-1).content += `\n\n${content}`;
    else found.push({ role, content });
  }
  return found;
}

async function answer(conversation) {
  const message = { role: "assistant", content: "", reasoning: "" };
  const body = { messages: historyOf(conversation), stream_options: { include_usage: true } };
  if (element("model").value) body.model = element("model").value;
  conversation.messages.push(message);
  conversation.updated = Date.now();
  if (!conversations.includes(conversation)) conversations.unshift(conversation);
  const controller = new AbortController();
  running.set(conversation.id, controller);
  element("progress").textContent = "The model answers.";
  save(conversation);
  if (conversation === current) showMessages();
  showList();
  try {
    await receive(conversation, message, body, controller.signal);
  } catch (error) {
    if (controller.signal.aborted) message.note = "Stopped.";
    else if (error instanceof ServerError) message.error = `${error.message[0].toUpperCase()}${error.message.slice(1)}.`;
    else if (error instanceof TypeError) message.error = "The server does not answer.";
    else throw error;
  } finally {
    running.delete(conversation.id);
    if (conversations.includes(conversation)) save(conversation);
    if (conversation === current) {
      update(message);
      showControls();
    }
    element("progress").textContent = message.error ?? message.note ?? "The answer is complete.";
  }
}

async function receive(conversation, message, body, signal) {
  let begin = 0;
  let saved = performance.now();
  let frame = 0;
  for await (const event of stream("/v1/chat/completions", body, signal)) {
    const delta = event.choices?.[0]?.delta ?? {};
    if (delta.content || delta.reasoning) begin ||= performance.now();
    message.content += delta.content ?? "";
    message.reasoning += delta.reasoning ?? "";
    if (event.choices?.[0]?.finish_reason === "length") message.note = "Ended at the limit of tokens. ";
    if (event.usage) message.note = `${message.note ?? ""}${speed(event.usage.completion_tokens, performance.now() - begin)}`;
    if (conversation === current && !frame) {
      frame = requestAnimationFrame(() => {
        frame = 0;
        if (conversation === current) update(message);
      });
    }
    if (performance.now() - saved > SAVE_MS) {
      saved = performance.now();
      save(conversation);
    }
  }
}

function speed(tokens, milliseconds) {
  const rate = tokens > 1 && milliseconds > 0 ? `, ${(((tokens - 1) * 1000) / milliseconds).toFixed(1)} tokens/s` : "";
  return `${tokens} ${tokens === 1 ? "token" : "tokens"}${rate}`;
}

// Shows what has come, and stays at the end if the user is there.
function update(message) {
  const list = element("messages");
  const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
  showMessage(message);
  if (isAtEnd) list.scrollTop = list.scrollHeight;
}
