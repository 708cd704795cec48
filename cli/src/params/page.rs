//! The paragraphs of `docs/params.md`, which is generated from the library's table.

const PARAMS: &str = include_str!("../../../docs/params.md");

/// What the page says beyond the C interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Page {
    /// Whether the parameter is accepted in a configuration file.
    pub(super) is_in_file: bool,
    pub(super) detail: &'static str,
}

/// Returns the page of a parameter; `None` if the library has one that this program does not know.
pub(super) fn of(name: &str) -> Option<Page> {
    let (_, after) = PARAMS.split_once(&format!("\n## `{name}`\n"))?;
    let section = after.split("\n## ").next().unwrap_or(after);
    let (_, after) = section.split_once("\n- in a file: ")?;
    let (is_in_file, detail) = after.split_once('\n')?;
    Some(Page { is_in_file: is_in_file == "yes", detail: detail.trim() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_parameter_of_the_page_is_found() {
        let names: Vec<&str> = PARAMS
            .lines()
            .filter_map(|line| line.strip_prefix("## `")?.strip_suffix('`'))
            .collect();
        assert!(names.len() >= 20, "{names:?}");
        for name in names {
            let page = of(name).unwrap();
            assert!(!page.detail.is_empty() && !page.detail.contains("\n## "), "{name}");
        }
        assert!(of("DORMOUSE_NVME_DIR").unwrap().is_in_file);
        assert!(!of("DORMOUSE_CONFIG").unwrap().is_in_file);
        assert!(of("DORMOUSE_NVME").is_none());
    }
}
