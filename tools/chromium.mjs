// Unpacks the Chromium that npm brought, once, and prints its path, its libraries' folder and the
// configuration of its fonts. For machines without one of their own; the folder to unpack into is TMPDIR.
import { existsSync, renameSync, writeFileSync } from "node:fs";
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

// The package's own configuration names /tmp/fonts. Without any font Chromium aborts on some pages.
const folder = join(tmpdir(), "fonts");
const escaped = folder.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
const fonts = join(folder, "here.conf");
const written = `${fonts}.${process.pid}`;
writeFileSync(written, `<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>${escaped}</dir><cachedir>${escaped}/cache</cachedir></fontconfig>
`);
renameSync(written, fonts);
console.log(JSON.stringify({ path, libraries, fonts }));
