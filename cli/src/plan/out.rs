//! Output files: the report, the plans, the plan file of each rank, pictures.

use std::fs;
use std::path::{Path, PathBuf};

use dormouse_parallel::draw::{page, pipeline_page, stages_svg, text_block};
use dormouse_schedule::{FileSequence, PlanFile};

use super::{Made, figures};
use crate::Error;
use crate::sequences::Described;
use crate::text::as_json;

/// Name of the page for a browser.
const PAGE: &str = "page.html";

impl Made {
    /// Returns the plan files of all ranks that have sequences.
    fn files(&self) -> impl Iterator<Item = PlanFile> + '_ {
        let ranks = self.ranks.as_ref();
        let count = ranks.map_or(1, |ranks| ranks.plans.len() as u32);
        let all = || (0..self.described.scoring.len() as u32).collect();
        let own = move |rank: u32| match ranks {
            None => self.plan.as_ref().map(|plan| (all(), plan)),
            Some(ranks) => {
                let share = ranks.shares.shares.get(rank as usize)?;
                let plan = ranks.plans.get(rank as usize)?.as_ref()?;
                Some((share.sequences.clone(), plan))
            }
        };
        (0..count).filter_map(move |rank| {
            let (sequences, plan) = own(rank)?;
            let sequences = sequences.into_iter().map(|number| self.sequence(number)).collect();
            Some(PlanFile { rank, ranks: count, sequences, plan: plan.clone() })
        })
    }

    fn sequence(&self, number: u32) -> FileSequence {
        let at = number as usize;
        let Described { names, checksums, .. } = &self.described;
        FileSequence {
            number,
            name: names.get(at).map(Into::into),
            tokens: self.tokens.get(at).copied().unwrap_or(0),
            crc32: checksums.get(at).copied(),
        }
    }
}

/// Writes all files into `folder`, which is created if missing; existing files are replaced. Returns the page for a
/// browser.
pub(super) fn write(folder: &Path, made: &Made) -> Result<PathBuf, Error> {
    fs::create_dir_all(folder)
        .map_err(|source| Error::Write { file: folder.to_owned(), source })?;
    let put = |name: &str, text: &str| {
        let file = folder.join(name);
        fs::write(&file, text).map_err(|source| Error::Write { file, source })
    };
    put("report.json", &as_json(&made.report)?)?;
    let mut pictures = Vec::new();
    if let Some(plan) = &made.plan {
        put("plan.json", &plan.to_json())?;
    }
    if let Some(ranks) = &made.ranks {
        put("shares.json", &as_json(&ranks.shares)?)?;
    }
    for file in made.files() {
        put(&format!("rank-{}.plan", file.rank), &file.to_text())?;
    }
    if let Some(memory) = &made.memory {
        put("memory.svg", memory)?;
        pictures.push(memory.clone());
    }
    if let Some(staged) = &made.stages {
        put("stages.json", &as_json(&staged.stages)?)?;
        let times = staged.pipeline.expected_times(&staged.stages)?;
        let picture = stages_svg(&staged.stages, &times);
        put("stages.svg", &picture)?;
        pictures.push(picture);
        let page = pipeline_page("dormouse plan: stages", &staged.pipeline, &staged.stages)?;
        put("stages.html", &page)?;
    }
    let sections = figures::sections(&made.report, &made.trees);
    let drawn = sections.iter().filter(|section| !section.picture.is_empty());
    pictures.splice(0..0, drawn.map(|section| text_block(&section.picture)));
    let labelled = sections.into_iter().flat_map(|section| {
        let label = move |(label, value)| (format!("{}: {label}", section.title), value);
        section.figures.into_iter().map(label)
    });
    put(PAGE, &page("dormouse plan", &labelled.collect::<Vec<_>>(), &pictures))?;
    Ok(folder.join(PAGE))
}
