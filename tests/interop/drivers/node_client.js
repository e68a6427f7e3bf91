// A refused field, and a stream that is cancelled after its first text; run by test_node.py, which reads the JSON.
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");
const files = loader.loadSync("octavo/v1/inference.proto", { includeDirs: ["proto"], longs: String, enums: String });
const { InferenceService } = grpc.loadPackageDefinition(files).octavo.v1;
const client = new InferenceService(process.argv[2], grpc.credentials.createInsecure());
const deadline = () => ({ deadline: Date.now() + 60_000 });

client.Complete({ generate: { text: "x", sampling: { topP: 7 } } }, deadline(), (refused) => {
  const stream = client.Generate({ text: "Once upon a time", stop: { maxTokens: 400, ignoreEos: true } }, deadline());
  stream.on("data", ({ delta }) => delta && stream.cancel());
  stream.on("error", (cancelled) => {
    const reason = refused.metadata.get("x-error-reason")[0];
    console.log(JSON.stringify({ code: refused.code, reason, details: refused.details, cancelled: cancelled.code }));
  });
});
