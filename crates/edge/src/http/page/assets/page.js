// The page: signs in, follows the event stream, and passes its messages to the views.

import { call, signIn, signOut } from "/page/api.js";
import { clear, cluster, take } from "/page/cluster.js";
import { at } from "/page/elements.js";
import { clock, setClock, span } from "/page/format.js";
import { fillHelp } from "/page/keys.js";
import { providers } from "/page/queues.js";
import { begin, end, showCurrent, tick } from "/page/router.js";

// Timeout of the stream in ms: without a message for so long, the connection is lost. Interval between attempts to reconnect in ms.
const SILENT = 4000;
const RETRY = 1000;

let [stream, lastMessage, retry] = [undefined, 0, undefined];

// The state of the connection. Without data, a strip states of what time the shown figures are.
function badge(isGood, text, title = "") {
  const live = at("live");
  live.className = isGood ? "good" : "";
  live.title = title;
  if (live.textContent !== text) live.textContent = text;
  at("page").classList.toggle("stale", !isGood);
  at("no-reply").hidden = isGood || !cluster.overview.snapshot_time;
  if (!isGood) at("no-reply").textContent = `No data for ${span((Date.now() - lastPicture) / 1000)}: ${title || text}. The figures are of ${at("clock").textContent}. The page tries again each second.`;
}

let lastPicture = 0;

function showLogin(why = "") {
  disconnect();
  // The contents are for the previous viewer only.
  end();
  clear();
  for (const id of ["who", "about", "clock"]) at(id).replaceChildren();
  at("page").hidden = true;
  at("login").hidden = false;
  at("login-error").textContent = why;
  at("token").focus();
}

function showServer() {
  const { server } = cluster;
  at("who").textContent = server.authentication ? `${server.principal} (${server.roles.join(", ")})` : "no sign-in: everybody may do everything";
  at("who").className = server.authentication ? "muted" : "amber";
  at("logout").hidden = !server.authentication;
  at("about").textContent = `linkis-rm ${server.version}, instance ${server.instance_id}`;
  providers().then((known) => {
    at("nav-queues").hidden = known.length === 0;
    showCurrent();
  }, () => {});
}

function showMessage(message) {
  const places = take(message);
  if (message.server) showServer();
  const { snapshot_time: time } = cluster.overview;
  setClock(time);
  at("clock").textContent = clock(time);
  lastPicture = Date.now();
  at("login").hidden = true;
  at("page").hidden = false;
  begin();
  tick(places);
  badge(true, "live");
}

function disconnect() {
  stream?.close();
  stream = undefined;
  clearTimeout(retry);
}

function connect() {
  disconnect();
  if (document.hidden) return;
  lastMessage = Date.now();
  stream = new EventSource("/api/v1/events");
  stream.addEventListener("picture", (event) => {
    lastMessage = Date.now();
    showMessage(JSON.parse(event.data));
  });
  stream.addEventListener("login", (event) => showLogin(JSON.parse(event.data)));
  stream.addEventListener("trouble", (event) => {
    lastMessage = Date.now();
    badge(false, "no data", JSON.parse(event.data));
  });
  stream.addEventListener("error", lost);
}

// A stream that fails to open gives no reason; the call of the session does.
async function lost() {
  disconnect();
  try {
    const session = await call("session");
    if (!session.signed_in) return showLogin(session.why);
    badge(false, "connecting");
  } catch (error) {
    badge(false, "no connection", error.message);
  }
  clearTimeout(retry);
  retry = setTimeout(connect, RETRY);
}

setInterval(() => {
  if (stream && Date.now() - lastMessage > SILENT) {
    badge(false, "no connection");
    lost();
  }
}, 500);

// A browser opens few connections to one server: a page that is not seen leaves its own to the others.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) disconnect();
  else if (at("login").hidden) connect();
});

at("login-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const field = at("token");
  try {
    await signIn(field.value.trim());
    field.value = "";
    at("login-error").textContent = "";
    connect();
  } catch (error) {
    at("login-error").textContent = error.message;
  }
});

at("logout").addEventListener("click", async () => {
  await signOut().catch(() => {});
  showLogin();
});

at("keys").addEventListener("click", () => {
  fillHelp();
  at("help").showModal();
});

// The session is read first, because a rejected stream is an error on the console.
async function start() {
  try {
    const session = await call("session");
    if (session.signed_in) connect();
    else showLogin(session.why);
  } catch (error) {
    at("page").hidden = false;
    badge(false, "no connection", error.message);
    setTimeout(start, RETRY);
  }
}

start();
