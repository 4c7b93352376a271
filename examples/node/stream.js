// Streams the answer to one question, and says in the end how many of the drafts were accepted.
//
//     npm start -- "Why is the sky blue?" --server http://127.0.0.1:50051

import { parseArgs } from "node:util";
import { Code, ConnectError, createClient } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";
import {
  FinishReason,
  GenerationService,
  TokenSource,
} from "./generated/draftgate/v1/generation_pb.js";

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    server: { type: "string", default: "http://127.0.0.1:50051" },
    "max-tokens": { type: "string", default: "64" },
  },
});

const client = createClient(GenerationService, createGrpcTransport({ baseUrl: values.server }));

async function stream(prompt) {
  const events = client.generate(
    {
      messages: [{ role: "user", content: prompt }],
      maxTokens: Number(values["max-tokens"]),
      sampling: { temperature: 0 },
    },
    { timeoutMs: 120_000 },
  );
  let tokens = 0;
  let drafted = 0;
  for await (const { event } of events) {
    if (event.case === "tokens") {
      process.stdout.write(event.value.text);
      tokens += event.value.tokens.length;
      drafted += event.value.tokens.filter(({ source }) => source === TokenSource.DRAFT).length;
    } else if (event.case === "finished") {
      console.log(`\n${tokens} tokens, ${drafted} of them drafted · ${summary(event.value)}`);
    }
  }
}

function summary({ finishReason, speculation }) {
  const reason = `ended by ${FinishReason[finishReason].toLowerCase()}`;
  // Absent is not known, or that nothing was drafted.
  const rate = speculation?.acceptanceRate;
  return rate === undefined ? reason : `acceptance ${Math.round(rate * 100)}% · ${reason}`;
}

try {
  await stream(positionals[0] ?? "Why is the sky blue?");
} catch (error) {
  const { code, rawMessage } = ConnectError.from(error);
  console.error(`${Code[code]}: ${rawMessage}`);
  process.exitCode = 1;
}
