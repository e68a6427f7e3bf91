// npm install @grpc/grpc-js @grpc/proto-loader; node examples/client/node.js 127.0.0.1:50051
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");
const files = loader.loadSync("octavo/v1/inference.proto", { includeDirs: ["proto"], longs: String, enums: String });
const { InferenceService } = grpc.loadPackageDefinition(files).octavo.v1;
const client = new InferenceService(process.argv[2], grpc.credentials.createInsecure());
const chat = { messages: [{ role: "CHAT_ROLE_USER", content: "Hello!" }] };
const request = { chat, sampling: { temperature: 0 }, stop: { maxTokens: 40 } };
const stream = client.Generate(request, { deadline: Date.now() + 60_000 });
stream.on("data", ({ delta, finished }) => process.stdout.write(delta ? delta.text : finished ? `\n${finished.reason}\n` : ""));
stream.on("error", (error) => console.error(error.details, error.metadata.get("x-error-reason")));
