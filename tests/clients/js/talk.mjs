// Talks to the server at the URL in argv[2] with OpenAI's client and prints one JSON object of what it saw.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none", maxRetries: 0 });
const asks = JSON.parse(process.argv[3]);
const seen = {};

seen.models = (await client.models.list()).data.map((model) => model.id);
seen.chat = await client.chat.completions.create(asks.chat);

const pieces = [];
let usage = null;
for await (const chunk of await client.chat.completions.create({ ...asks.chat, stream: true, stream_options: { include_usage: true } })) {
  pieces.push(chunk.choices[0]?.delta?.content ?? "");
  usage = chunk.usage ?? usage;
}
seen.stream = { text: pieces.join(""), usage };

seen.completion = (await client.completions.create(asks.completion)).choices[0].text;
seen.response = (await client.responses.create(asks.response)).output_text;

const events = [];
for await (const event of await client.responses.create({ ...asks.response, stream: true })) events.push(event.type);
seen.events = [events[0], events.at(-1)];

try {
  await client.chat.completions.create({ ...asks.chat, messages: "none" });
} catch (error) {
  seen.error = { name: error.constructor.name, status: error.status };
}

const leaving = new AbortController();
let heard = 0;
try {
  const long = await client.chat.completions.create({ ...asks.chat, max_tokens: 1500, stream: true }, { signal: leaving.signal });
  for await (const _ of long) if (++heard === 3) leaving.abort();
} catch (error) {
  seen.aborted = error.constructor.name;
}
seen.heard = heard;

const many = await Promise.all(Array.from({ length: 6 }, () => client.chat.completions.create(asks.chat)));
seen.many = many.map((one) => one.choices[0].message.content);

console.log(JSON.stringify(seen));
