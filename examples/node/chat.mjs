// Ask an engine over gRPC, with engine.proto and two packages: npm ci
//
//     node examples/node/chat.mjs unix:/path/to/engine.sock "Why is the sky blue?"
//
// The reply comes as it is generated. Then a line says what it cost, and another has its token ids.

import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';

import grpc from '@grpc/grpc-js';
import loader from '@grpc/proto-loader';

const PROTO = fileURLToPath(new URL('../../proto/engine/v1/engine.proto', import.meta.url));

// What a client can do about each status; the engine's message has the details.
const ADVICE = {
  [grpc.status.INVALID_ARGUMENT]: 'change the request: the message names the field',
  [grpc.status.NOT_FOUND]: 'leave --model out, or ask the engine that serves it',
  [grpc.status.RESOURCE_EXHAUSTED]: 'wait, then ask again',
  [grpc.status.UNAVAILABLE]: 'see that `engine serve` runs at that address, then ask again',
  [grpc.status.DEADLINE_EXCEEDED]: 'give it more time',
  [grpc.status.INTERNAL]: "look into the engine's log",
};

function connect(address) {
  const definition = loader.loadSync(PROTO, {
    keepCase: true, // names as in the proto
    longs: Number, // counters stay far below 2^53
    enums: String,
    defaults: true,
    oneofs: true, // message.event says which of its fields is set
  });
  const { Engine } = grpc.loadPackageDefinition(definition).engine.v1;
  return new Engine(address, grpc.credentials.createInsecure());
}

function tell(done, tokenIds) {
  const { usage } = done;
  const match = usage.match.replace('CACHE_MATCH_', '').toLowerCase();
  const reason = done.finish_reason.replace('FINISH_REASON_', '').toLowerCase();
  console.log();
  console.error(
    `${usage.prompt_tokens} prompt tokens, ${usage.cached_tokens} of them cached (${match}); ` +
      `${usage.completion_tokens} tokens, then ${reason}`,
  );
  console.error(`token ids: [${tokenIds.join(', ')}]`);
}

async function main() {
  const { values: flags, positionals } = parseArgs({
    allowPositionals: true,
    options: {
      model: { type: 'string', default: '' }, // refuse an engine that serves another one
      'max-tokens': { type: 'string', default: '256' },
      seconds: { type: 'string', default: '600' }, // deadline of the whole reply
      'cancel-after': { type: 'string' }, // tokens, and then leave
    },
  });
  const [address, question] = positionals;
  if (positionals.length !== 2) {
    console.error('usage: node chat.mjs ADDRESS QUESTION [--max-tokens N] [--cancel-after N]');
    return 2;
  }
  const request = {
    model: flags.model,
    prompt: { chat: { messages: [{ role: 'user', content: question }] } },
    max_tokens: Number(flags['max-tokens']),
  };
  const client = connect(address);
  const deadline = Date.now() + 1000 * Number(flags.seconds);
  const reply = client.Generate(request, { deadline });
  const tokenIds = [];
  try {
    for await (const message of reply) {
      if (message.event === 'done') {
        tell(message.done, tokenIds);
        continue;
      }
      process.stdout.write(message.delta.text);
      tokenIds.push(...message.delta.token_ids);
      if (flags['cancel-after'] && tokenIds.length >= Number(flags['cancel-after'])) {
        // The engine stops at the next token, and frees the request's place.
        reply.cancel();
      }
    }
    return 0;
  } catch (error) {
    console.log();
    if (error.code === grpc.status.CANCELLED) {
      console.error(`cancelled after ${tokenIds.length} tokens`);
      return 0;
    }
    const advice = ADVICE[error.code] ?? 'see docs/api.md';
    console.error(`${grpc.status[error.code]}: ${error.details}: ${advice}`);
    return 1;
  } finally {
    client.close();
  }
}

process.exitCode = await main();
