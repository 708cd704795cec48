// Objects, buffers outside of the collector's heap, and text.
const zlib = require('zlib');
const crypto = require('crypto');
const sum = crypto.createHash('sha256');
for (let i = 0; i < 300; i++) {
  const rows = Array.from({length: 2000}, (_, j) => ({id: j, name: 'row' + i * j}));
  const packed = zlib.deflateSync(Buffer.from(JSON.stringify(rows)));
  sum.update(zlib.inflateSync(packed));
}
console.log(sum.digest('hex'));
