//! Figures and pictures in one HTML file.

use std::fmt::Write as _;

use super::text::escaped;

/// Style of pictures, in the colour-blind-safe palette of Okabe and Ito; groups differ in shade.
pub(super) const STYLE: &str = ".chart{color-scheme:light dark;font:11px system-ui,sans-serif;\
fill:currentColor}.chart text{fill:currentColor}\
.a{fill:#0072b2}.a.g1{fill:#4799c8}.a.g2{fill:#85bbda}\
.f{fill:#e69f00}.f.g1{fill:#edba47}.f.g2{fill:#f3d185}\
.b{fill:#d55e00}.b.g1{fill:#e18b47}.b.g2{fill:#ebb285}\
.c{fill:#009e73}.c.g1{fill:#47b99a}.c.g2{fill:#85d0bc}\
.chart .label{fill:#000;text-anchor:middle;font-size:10px;pointer-events:none}\
.chart .axis{text-anchor:middle;opacity:.75}\
.tick{stroke:currentColor;stroke-opacity:.18}.idle{stroke:currentColor;stroke-opacity:.3}\
.omitted{fill:currentColor;fill-opacity:.15}.bytes{fill:#56b4e9;fill-opacity:.6;stroke:#0072b2}";

/// Style of the page.
const PAGE_STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:1240px;margin:2rem auto;\
padding:0 1rem;background:#fff;color:#1a1a1a}svg{max-width:100%;height:auto;display:block;\
margin:1.5rem 0}table{border-collapse:collapse}td,th{padding:.2rem .8rem .2rem 0;text-align:left;\
border-bottom:1px solid #8886}pre{line-height:1.2;overflow-x:auto}\
td{font-variant-numeric:tabular-nums}\
@media(prefers-color-scheme:dark){body{background:#14171a;color:#e8e8e8}}";

/// Content security policy: nothing is fetched or executed.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'";

/// Returns an HTML page with a title, a table of figures (label, value) and pictures of this module.
#[must_use]
pub fn page(title: &str, figures: &[(String, String)], pictures: &[String]) -> String {
    let title = escaped(title);
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"{POLICY}\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>{title}</title>\n<style>{PAGE_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
    );
    out.push_str("<table>\n");
    for (what, how_much) in figures {
        let (what, how_much) = (escaped(what), escaped(how_much));
        let _ = writeln!(out, "<tr><th>{what}</th><td>{how_much}</td></tr>");
    }
    out.push_str("</table>\n");
    for picture in pictures {
        out.push_str(picture);
    }
    out.push_str("</body>\n</html>\n");
    out
}
