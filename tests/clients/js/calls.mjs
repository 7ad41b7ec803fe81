// Streams one chat from the server at the URL in argv[2] with OpenAI's client and prints its tool calls: id, name, arguments.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const calls = [];
for await (const chunk of await client.chat.completions.create({ ...JSON.parse(process.argv[3]), stream: true })) {
  for (const delta of chunk.choices[0]?.delta?.tool_calls ?? []) {
    const call = (calls[delta.index] ??= ["", "", ""]);
    call[0] += delta.id ?? "";
    call[1] += delta.function?.name ?? "";
    call[2] += delta.function?.arguments ?? "";
  }
}
console.log(JSON.stringify(calls));
