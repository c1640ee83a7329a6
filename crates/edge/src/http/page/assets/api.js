// What the service is asked beside the stream: each call by its own name, its fields as the query.

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const LONGEST = 8000;

// What others were told a moment ago will do.
const OLDER = { "cache-control": "max-age=1" };

async function answered(path, options) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(LONGEST), cache: "no-store", ...options });
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => ({}));
  throw new Refused(answer.status, told.message ?? `the service answers ${answer.status}`);
}

export async function ask(method, fields = {}) {
  const query = new URLSearchParams(Object.entries(fields).filter(([, value]) => value !== undefined));
  return (await answered(`/api/v1/${method}?${query}`, { headers: OLDER })).json();
}

export const signIn = (token) => answered("/login", { method: "POST", body: new URLSearchParams({ token }) });

export const signOut = () => answered("/logout", { method: "POST" });
