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

export async function call(method, fields = {}) {
  const query = new URLSearchParams(Object.entries(fields).filter(([, value]) => value !== undefined));
  return (await reply(`/api/v1/${method}?${query}`, { headers: OLDER })).json();
}

export const signIn = (token) => reply("/login", { method: "POST", body: new URLSearchParams({ token }) });

export const signOut = () => reply("/logout", { method: "POST" });
