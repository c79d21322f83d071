// Drives the npm client against the daemon at argv[2]; prints what it saw as one line of JSON.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const asked = { model: "tiny", messages: [{ role: "user", content: "Hello" }], max_tokens: 8, temperature: 0 };

const whole = await client.chat.completions.create(asked);
let streamed = "";
let usage = null;
const stream = await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
const completion = await client.completions.create({ model: "tiny", prompt: "Hello", max_tokens: 8, temperature: 0 });
const models = [];
for await (const model of client.models.list()) models.push(model.id);

const errors = {};
for (const [name, change] of Object.entries({ model: { model: "other" }, messages: { messages: [] } })) {
  try {
    await client.chat.completions.create({ ...asked, ...change });
  } catch (error) {
    errors[name] = {
      kind: error.constructor.name,
      status: error.status,
      code: error.code,
      param: error.param,
      hasId: Boolean(error.requestID),
    };
  }
}
console.log(
  JSON.stringify({
    whole: whole.choices[0].message.content,
    streamed,
    usages: [whole.usage, usage],
    completion: completion.choices[0].text,
    models,
    errors,
  }),
);
