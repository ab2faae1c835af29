// The start of the page: asks for the key where the server has one, and shows the chat or the cluster.

import { startChat } from "./chat.js";
import { watchCluster } from "./cluster.js";
import { forgetKey, key, request, ServerError, setKey } from "./server.js";

const RETRY_MS = 2000;
const element = (id) => document.getElementById(id);

async function start() {
  const settings = await read();
  element("to-chat").hidden = !settings.has_chat;
  addEventListener("hashchange", () => show(settings));
  show(settings);
  if (settings.has_key) await askForKey();
  if (settings.has_chat) startChat();
  watchCluster(async () => {
    forgetKey();
    await askForKey();
  });
}

async function read() {
  for (;;) {
    try {
      return await (await request("/page/settings")).json();
    } catch (error) {
      if (!(error instanceof ServerError || error instanceof TypeError)) throw error;
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

function show({ has_chat: hasChat }) {
  const name = hasChat && location.hash !== "#cluster" ? "chat" : "cluster";
  for (const each of ["chat", "cluster"]) {
    element(each).hidden = each !== name;
    if (each === name) element(`to-${each}`).setAttribute("aria-current", "page");
    else element(`to-${each}`).removeAttribute("aria-current");
  }
  if (name === "chat") element("text").focus();
}

// Returns once there is a key that the server accepts.
async function askForKey() {
  const dialog = element("ask");
  for (let problem = ""; !(key() && (problem = await refusalOf()) === ""); ) {
    element("ask-error").textContent = problem;
    element("ask-error").hidden = !problem;
    if (!dialog.open) dialog.showModal();
    await new Promise((resolve) => {
      const form = element("ask-form");
      const accept = (event) => {
        event.preventDefault();
        const text = element("key").value.trim();
        if (!/^[!-~]+$/.test(text)) return;
        form.removeEventListener("submit", accept);
        setKey(text, element("keep").checked);
        resolve();
      };
      form.addEventListener("submit", accept);
    });
  }
  element("key").value = "";
  if (dialog.open) dialog.close();
}

// Why the server does not accept the key; "" if it does, or if only its answer will say.
async function refusalOf() {
  try {
    await request("/version");
    return "";
  } catch (error) {
    if (!(error instanceof ServerError || error instanceof TypeError)) throw error;
    if (error.status !== 401) return "";
  }
  forgetKey();
  return "The server does not accept this key.";
}

addEventListener("cancel", (event) => event.preventDefault(), true); // Esc does not close the question
start();
