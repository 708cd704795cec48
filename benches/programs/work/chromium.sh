# A page that builds its own content; without a sandbox, since root may run it.
cat > page.html <<'HTML'
<body><script>
let sum = 0;
for (let i = 0; i < 2000; i++) { const d = document.createElement('p'); d.textContent = 'row' + i; document.body.append(d); sum += d.textContent.length; }
document.title = 'sum ' + sum;
</script></body>
HTML
chromium --headless --no-sandbox --disable-gpu --user-data-dir="$PWD/profile" --dump-dom "file://$PWD/page.html" > page
# A page whose script did not run is no result.
grep -q "<title>sum " page
sha256sum < page
