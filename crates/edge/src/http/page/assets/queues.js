// Providers of external queues. Operators list them; other viewers see the provider of Yarn that has no labels.

import { Refused, call } from "/page/api.js";

// Returns `{ type, name }` of each provider, and keeps them in `providers.last`.
export async function providers() {
  try {
    const reply = await call("ListProviders");
    providers.last = reply.providers.map(({ resource_type, name }) => ({ type: resource_type, name }));
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    providers.last = await unlabelled();
  }
  return providers.last;
}

providers.last = [];

async function unlabelled() {
  try {
    return [{ type: "Yarn", name: (await call("ListQueues", { page_size: 1 })).provider_name }];
  } catch (error) {
    if (error instanceof Refused) return [];
    throw error;
  }
}
