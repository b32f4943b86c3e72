// Stores three blocks of a prompt, looks them up, reads them back and deletes them, over unary.sock.
//
// usage: node store.js [SOCKET_DIR]        (default: $KVSTORED_SOCKET_DIR, else /run/kvstored)
//    or: KVSTORED_TOKEN=... node store.js host:port        (a TCP listener; see docs/unary.md)
import { fileURLToPath } from "node:url";
import path from "node:path";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

// The .proto files of the repository; KVSTORED_PROTO names another place that has kvstore_proto/v1/.
const here = path.dirname(fileURLToPath(import.meta.url));
const protos = process.env.KVSTORED_PROTO ?? path.join(here, "../../proto");

const kvstore = grpc.loadPackageDefinition(
  protoLoader.loadSync("kvstore_proto/v1/unary.proto", {
    includeDirs: [protos],
    keepCase: true, // field names as in the .proto
    enums: String,
    longs: Number,
    defaults: true,
  }),
).kvstore.v1;

const place = process.argv[2] ?? process.env.KVSTORED_SOCKET_DIR ?? "/run/kvstored";
const isAddress = /:\d+$/.test(place);
const token = process.env.KVSTORED_TOKEN;
const metadata = new grpc.Metadata();
if (token) metadata.set("authorization", `Bearer ${token}`);

const client = new kvstore.KVStoreUnary(
  isAddress ? place : `unix:${path.join(path.resolve(place), "unary.sock")}`,
  grpc.credentials.createInsecure(),
  { "grpc.max_receive_message_length": 16 << 20 }, // gRPC's own limit is 4 MiB
);

/** One unary call as a promise, with a deadline: an engine must never wait for its cache. */
function call(method, request) {
  return new Promise((resolve, reject) => {
    const deadline = Date.now() + 5000;
    client[method](request, metadata, { deadline }, (error, reply) => (error ? reject(error) : resolve(reply)));
  });
}

// What the bytes depend on, apart from the tokens: canonical JSON (sorted keys, no spaces), every field present.
const BLOCK_TOKENS = 64;
const BLOCK_BYTES = 2 * 512 * BLOCK_TOKENS; // layers * bytes_per_token_per_layer * block_tokens
const fingerprint = Buffer.from(
  JSON.stringify({
    adapter_digest: "",
    block_tokens: BLOCK_TOKENS,
    engine_block_tokens: 16,
    groups: [{ bytes_per_token_per_layer: 512, group_id: 0, kind: "full", layers: [0, 1], window_tokens: 0 }],
    key_hash: "xxh3",
    kv_dtype: "f16",
    layout: "layer-major/k-then-v/token-major",
    model_name: "demo",
    rope: "",
    shard_count: 1,
    shard_index: 0,
    tokenizer_digest: "",
    weights_digest: "sha256 of the weights",
  }),
);

const tokens = Array.from({ length: 3 * BLOCK_TOKENS }, (_, index) => index); // 3 blocks
const chain = { fingerprint, token_ids: tokens };
const payloads = [1, 2, 3].map((block) => Buffer.alloc(BLOCK_BYTES, block));

try {
  const stored = await call("Put", { chain, payloads });
  console.log("put:   ", stored.statuses.join(" "), "/", stored.durability.join(" "));

  const found = await call("Lookup", { chain: { ...chain, token_ids: [...tokens, ...Array(BLOCK_TOKENS).fill(7)] } });
  console.log("lookup:", found.usable_blocks, "blocks can be had;", found.statuses[3], "because", found.miss_reasons[3]);

  const got = await call("Get", { chain });
  const whole = got.payloads.length === 3 && got.payloads.every((payload, block) => payload.equals(payloads[block]));
  console.log("get:   ", got.statuses.join(" "), whole ? "- the same bytes" : "- OTHER BYTES");

  // An opaque object under a name of one's own, for instance the digest of something: 16 bytes.
  const object = { names: Buffer.from("an object's name") };
  await call("Put", { chain: object, payloads: [Buffer.from("any bytes")] });
  console.log("object:", (await call("Get", { chain: object })).payloads[0].toString());

  const gone = [await call("Delete", { chain }), await call("Delete", { chain: object })];
  console.log("delete:", gone.flatMap((reply) => reply.statuses).join(" "));
  process.exitCode = whole ? 0 : 1;
} catch (error) {
  console.error(`${grpc.status[error.code] ?? "error"}: ${error.details ?? error.message}`);
  process.exitCode = 1;
} finally {
  client.close();
}
