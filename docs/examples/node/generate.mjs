// Asks Drafthouse for a text and prints it while it comes: node generate.mjs HOST:PORT MODEL PROMPT [MAX_TOKENS]
//
// No .proto file and no generated code: the server's reflection tells what its messages are.
import grpc from '@grpc/grpc-js';
import { GrpcReflection } from 'grpc-js-reflection-client';

const SERVICE = 'drafthouse.v1.GenerationService';

const [address, model, prompt, maxTokens = '48'] = process.argv.slice(2);
if (prompt === undefined) {
  console.error('usage: node generate.mjs HOST:PORT MODEL PROMPT [MAX_TOKENS]');
  process.exit(2);
}

const credentials = grpc.credentials.createInsecure(); // grpc.credentials.createSsl() behind TLS
const reflection = new GrpcReflection(address, credentials);
const descriptor = await reflection.getDescriptorBySymbol(SERVICE);
const { GenerationService } = descriptor.getPackageObject({
  keepCase: true, // the names of the .proto file
  longs: String, // a seed has 64 bits, a number of JavaScript 53
  enums: String,
}).drafthouse.v1;

const client = new GenerationService(address, credentials);
const call = client.Generate({ model, text: prompt, sampling: { max_tokens: Number(maxTokens) } });
let last;
try {
  // Leaving this loop cancels the request.
  for await (const response of call) {
    for (const choice of response.choices ?? []) process.stdout.write(choice.text ?? '');
    last = response;
  }
  process.stdout.write('\n');
  console.error(`${last.usage.completion_tokens} tokens with seed ${last.seed}`);
} catch (error) {
  const param = error.metadata?.get('drafthouse-param')[0];
  console.error(`${grpc.status[error.code] ?? error.name}: ${error.details ?? error.message}${param ? ` (${param})` : ''}`);
  process.exitCode = 1;
} finally {
  client.close();
}
