// The metrics of the runs' tasks: a chart for each, and how its numbers are told.

import { LineChart } from "./lines.js";
import { NOTHING, exact } from "./numbers.js";

export function scoreOf(run) {
  return run.metrics.metrics.find((metric) => metric.name === run.metrics.score);
}

// Every metric of any run, scores first.
export function metricsOf(runs) {
  const found = new Map(runs.map((run) => [run.metrics.score, scoreOf(run)]));
  for (const run of runs) for (const metric of run.metrics.metrics) if (!found.has(metric.name)) found.set(metric.name, metric);
  return [...found.values()];
}

export function tellMetric(metric, value) {
  if (value === null || value === undefined) return NOTHING;
  return metric.percent ? `${(100 * value).toFixed(1)} %` : exact(Number(value.toPrecision(4)));
}

function isScore(runs, metric) {
  return runs.some((run) => run.metrics.score === metric.name);
}

// The targets of the runs whose score it is.
function targets(runs, metric) {
  const wanted = new Set(runs.filter((run) => run.metrics.score === metric.name && run.target !== null).map((run) => run.target));
  return [...wanted].map((value) => ({ label: `target ${metric.percent ? `${Number((100 * value).toPrecision(4))} %` : value}`, value }));
}

// The charts of all metrics: the score large, then that of the running average, then the rest.
export function scoreCharts(page, taken) {
  const { runs } = page.store;
  const metrics = metricsOf(runs);
  const chart = (metric, options) => {
    const format = metric.percent ? { format: "percent", ceiling: 1.005 } : {};
    const id = taken.has(metric.name) ? `metric-${metric.name}` : metric.name;
    return new LineChart(page, { id, title: sentence(metric.label), column: metric.name, about: "The global model on the test set.", bottom: 0, ...format, ...options });
  };
  const scores = metrics.filter((metric) => isScore(runs, metric));
  const references = (metric) => () => targets(page.store.runs, metric);
  return [
    ...scores.map((metric) => chart(metric, { tall: 340, wide: true, references: references(metric) })),
    ...scores.map((metric, k) => chart(metric, {
      id: k ? `average-${metric.name}` : "average",
      title: `${sentence(metric.label)} of the running average`,
      column: `average_${metric.name}`,
      about: "The running average of the global models on the test set (aggregation.average).",
      optional: true,
      references: references(metric),
    })),
    // Not every metric exists in every run: top-5 accuracy does not with five classes.
    ...metrics.filter((metric) => !scores.includes(metric)).map((metric) => chart(metric, { optional: true })),
  ];
}

function sentence(label) {
  return label.charAt(0).toUpperCase() + label.slice(1);
}
