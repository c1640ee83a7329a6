// Calls beside the event stream: the name of the call is the path, its fields are the query.

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const TIMEOUT = 8000;

// A reply that another viewer received within the last second is accepted.
const OLDER = { "cache-control": "max-age=1" };

async function reply(path, options) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(TIMEOUT), cache: "no-store", ...options });
  if (answer.ok) return answer;
  const error = await answer.json().catch(() => ({}));
  throw new Refused(answer.status, error.message ?? `the service replies ${answer.status}`);
}

// A field that is a list is repeated; one without a value is left out.
export async function call(method, fields = {}) {
  const set = Object.entries(fields).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const query = new URLSearchParams(set.flatMap(([name, value]) => [value].flat().map((one) => [name, one])));
  return (await reply(`/api/v1/${method}?${query}`, { headers: OLDER })).json();
}

// All entries of a list, from up to `pages` pages of the largest size. `partial` is true if more follow.
export async function all(method, entries, fields = {}, pages = 1) {
  const [found, reply] = [[], { next_page_token: undefined }];
  for (let page = 0; page < pages; page += 1) {
    Object.assign(reply, await call(method, { ...fields, page_size: 1000, page_token: reply.next_page_token }));
    found.push(...reply[entries]);
    if (!reply.next_page_token) break;
  }
  return { found, partial: Boolean(reply.next_page_token) };
}

export const signIn = (token) => reply("/login", { method: "POST", body: new URLSearchParams({ token }) });

export const signOut = () => reply("/logout", { method: "POST" });
