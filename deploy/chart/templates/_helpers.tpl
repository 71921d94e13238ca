{{- define "asr-server.name" -}}
{{- if contains "asr-server" .Release.Name }}{{ .Release.Name | trunc 63 | trimSuffix "-" }}{{ else }}{{ printf "%s-asr-server" .Release.Name | trunc 63 | trimSuffix "-" }}{{ end }}
{{- end }}
{{- define "asr-server.selector" -}}
app.kubernetes.io/name: asr-server
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "asr-server.labels" -}}
{{ include "asr-server.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}
