// The page: signs in, follows the event stream, and passes its messages to the views.

import { call, signIn, signOut } from "/page/api.js";
import { showCharts, showTiles } from "/page/cluster.js";
import { clock, setClock } from "/page/format.js";
import { EmMap } from "/page/ems.js";
import { keepLists, showFullest } from "/page/lists.js";
import { closePanel, search } from "/page/panel.js";

// Timeout of the stream in ms: without a message for so long, the connection is lost. Interval between attempts to reconnect in ms.
const SILENT = 4000;
const RETRY = 1000;

const at = (id) => document.getElementById(id);
const map = new EmMap();
const seen = { overview: {}, points: [], server: {} };
let [stream, lastMessage, retry, lists] = [undefined, 0, undefined, undefined];

function badge(kind, text, title = "") {
  const live = at("live");
  live.className = `badge ${kind}`;
  live.title = title;
  if (live.textContent !== text) live.textContent = text;
  at("page").classList.toggle("stale", kind === "bad");
}

function showLogin(why = "") {
  disconnect();
  lists?.stop();
  lists = undefined;
  closePanel();
  // The contents are for the previous viewer only.
  Object.assign(seen, { overview: {}, points: [], server: {} });
  map.clear();
  for (const id of ["tiles", "charts", "fullest", "waiting", "locked", "refused", "actions", "who", "about"]) at(id).replaceChildren();
  at("page").hidden = true;
  at("login").hidden = false;
  at("login-error").textContent = why;
  at("token").focus();
}

function showPage() {
  at("login").hidden = true;
  at("page").hidden = false;
  lists ??= keepLists(seen);
}

function showServer() {
  const { server } = seen;
  at("who").textContent = server.authentication ? `${server.principal} (${server.roles.join(", ")})` : "no authentication";
  at("logout").hidden = !server.authentication;
  at("about").textContent = `linkis-rm ${server.version}, instance ${server.instance_id}`;
  const request = JSON.stringify({
    em: { application_name: "linkis-cg-engineconnmanager", instance: "host1:9102" },
    total: { load_instance: { memory: 68719476736, cores: 16, instances: 20 } },
  });
  const plain = server.tls ? "" : " -plaintext";
  const token = server.authentication ? ' -H "authorization: Bearer $TOKEN"' : "";
  at("empty-command").textContent = `grpcurl${plain}${token} -d '${request}' ${server.grpc} linkis.rm.v1.ResourceManagerService/Register`;
}

function show(message) {
  if (message.server) {
    seen.server = message.server;
    map.clear();
    seen.points = [];
    showServer();
  }
  Object.assign(seen.overview, message.overview ?? {});
  if (message.points) {
    const since = (message.points.at(-1)?.t ?? 0) - 15 * 60;
    seen.points = [...seen.points, ...message.points].filter((point) => point.t >= since);
    showCharts(seen);
  }
  map.take(message);
  const { snapshot_time: time } = seen.overview;
  setClock(time);
  at("clock").textContent = clock(time);
  at("empty").hidden = map.names.length > 0;
  at("ems").hidden = map.names.length === 0;
  showTiles(seen.overview);
  if (message.overview?.scopes) showFullest(seen.overview.scopes);
  badge("good", "live");
}

function disconnect() {
  stream?.close();
  stream = undefined;
  clearTimeout(retry);
}

function connect() {
  disconnect();
  lastMessage = Date.now();
  stream = new EventSource("/api/v1/events");
  stream.addEventListener("picture", (event) => {
    lastMessage = Date.now();
    showPage();
    show(JSON.parse(event.data));
  });
  stream.addEventListener("login", (event) => showLogin(JSON.parse(event.data)));
  stream.addEventListener("trouble", (event) => {
    lastMessage = Date.now();
    badge("bad", "no data", JSON.parse(event.data));
  });
  stream.addEventListener("error", lost);
}

// A stream that fails to open gives no reason; the call of the session does.
async function lost() {
  disconnect();
  try {
    const session = await call("session");
    if (!session.signed_in) return showLogin(session.why);
    badge("bad", "connecting");
  } catch (error) {
    badge("bad", "no connection", error.message);
  }
  clearTimeout(retry);
  retry = setTimeout(connect, RETRY);
}

setInterval(() => {
  if (stream && Date.now() - lastMessage > SILENT) {
    badge("bad", "no connection");
    lost();
  }
}, 500);

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

at("search-form").addEventListener("submit", (event) => {
  event.preventDefault();
  search(at("search").value.trim(), map);
});
at("search").addEventListener("input", () => map.mark(at("search").value.trim()));

addEventListener("keydown", (event) => {
  if (event.key === "Escape") closePanel();
});

// The session is read first, because a rejected stream is an error on the console.
async function begin() {
  try {
    const session = await call("session");
    if (session.signed_in) connect();
    else showLogin(session.why);
  } catch (error) {
    at("page").hidden = false;
    badge("bad", "no connection", error.message);
    setTimeout(begin, RETRY);
  }
}

begin();
