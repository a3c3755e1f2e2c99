// Unpacks the Chromium that npm brought, once, and prints its path and its libraries' folder.
// For machines without one of their own; the folder to unpack into is TMPDIR.
import { existsSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { tmpdir } from "node:os";
import chromium, { inflate } from "@sparticuz/chromium";

const path = await chromium.executablePath();
const libraries = join(tmpdir(), "al2023", "lib");
if (!existsSync(libraries)) {
  const home = dirname(dirname(createRequire(import.meta.url).resolve("@sparticuz/chromium")));
  await inflate(join(home, "bin", "al2023.tar.br"));
}
console.log(JSON.stringify({ path, libraries }));
